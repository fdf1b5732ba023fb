// ---- time ---------------------------------------------------------------------------------------

// The planner's names of the fields' choices.
const RECOMPUTES = ["none", "gelu", "layer"], ORDERS = ["tdp", "tpd", "dtp", "dpt", "ptd", "pdt"];
const SHARED_FLAGS = {
    layers: "layers",
    heads: "heads",
    channels: "channels",
    seq: "seq",
    vocab: "vocab",
    global: "batch",
};
const LAYOUT_FLAGS = {
    tensor: "tensor",
    pipeline: "pipeline",
    data: "data",
    virtual: "virtual",
    micro: "micro-batch",
    recompute: "recompute",
    order: "order",
    sp: "sequence-parallel",
    zero: "zero",
};
const FLAGS_5D = {context: "context", expert: "expert-parallel"};
const DEFAULT_LIMIT = 2;  // of zb-auto, times p

const gpusOf = values => Number(values.tensor) * Number(values.data) * Number(values.pipeline);

// Returns the cluster file's constants as the planner's C reads them. Fields replace some of them.
function clusterText(values) {
    const constants = {...CLUSTERS[values.cluster]};
    if (values.node !== "") constants.gpus_per_node = Number(values.node);
    if (values.memory !== "") constants.memory = 1e9 * Number(values.memory);
    const texts = Object.entries(constants).map(([name, x]) =>
        `${name} ${typeof x === "boolean" ? Number(x) : x}`);
    return texts.join(" ");
}

function planFlags(values, names) {
    const texts = Object.entries(names).map(([field, flag]) => `--${flag} ${values[field].trim()}`);
    return texts.join(" ");
}

// Returns the flags of the model, the GPUs and the batch: the planner's question.
function wishFlags(values) {
    const named = Object.hasOwn(LLAMAS, values.model) ? `--model ${values.model} ` : "";
    const shared = planFlags(values, SHARED_FLAGS);
    return `${named}${shared} --cluster ${values.cluster} --gpus ${gpusOf(values)}`;
}

// Returns the question for one layout, with every choice made.
function timeQuestion(values) {
    const schedule = values.schedule || (Number(values.virtual) > 1 ? "interleaved" : "1f1b");
    const usual = DEFAULT_LIMIT * Number(values.pipeline);
    return {flags: `${wishFlags(values)} ${planFlags(values, LAYOUT_FLAGS)} --schedule ${schedule}`,
            limit: values.limit === "" ? usual : Number(values.limit)};
}

function besideQuestion(now, changed) {
    return {cluster: clusterText(now), base: timeQuestion(now), ...timeQuestion(changed)};
}

const tokensOf = values => Number(values.global) * Number(values.seq);
const secondsText = x => x >= 1 ? `${x.toFixed(3)} s`
                                : `${(1000 * x).toFixed(x < 0.01 ? 3 : 1)} ms`;
const COMMUNICATION = ["tensor", "pipeline", "data"];
const exposed = row => COMMUNICATION.reduce((sum, name) => sum + row.parts[name], 0);
const share = (row, x) => (100 * Math.max(0, x) / row.seconds).toFixed(1) + "%";

// Says why there is no time: the page's planner has no train_5d. The planner in a terminal knows
// its mixtures of experts.
function noTime(v) {
    const text = "this page times layouts without c and e";
    if (!Object.hasOwn(MIXTURES, v.model)) return text;
    return `${text}; in a terminal: build/tools/plan --light ${timeQuestion(v).flags} ` +
        `${planFlags(v, FLAGS_5D)} --capacity ${v.capacity || 0}`;
}

let timed = null;  // the time of the layout that is shown; null: not there yet

// Asks for the time of the layout and shows it; a new layout ends it.
async function showTime(r) {
    const v = r.values;
    timed = null;
    $("samebox").hidden = true;
    $("parttimes").parentElement.hidden = true;
    if (v.precision !== "bf16")
        return facts("times", [["Step", "the cluster files' times are those of bf16"]]);
    if (trainerOf(v) === 3)
        return facts("times", [["Step", noTime(v)]]);
    facts("times", [["Step", "working..."]]);
    try {
        timed = await askTime("time", {cluster: clusterText(v), ...timeQuestion(v)});
    } catch (e) {
        if (laid === r && e.message !== "superseded")
            facts("times", [["Step", "unknown: " + e.message]]);
        return;
    }
    const x = timed, fits = x.memory <= r.memory;
    facts("times", [
        ["Step", `${fits ? "" : "would take, if it did fit: "}${secondsText(x.seconds)}, ` +
                 `${countText(tokensOf(v) / x.seconds)} tokens/s, ` +
                 `MFU ${(100 * x.mfu).toFixed(1)}%`],
        ["Exposed communication", `${share(x, exposed(x))} of the step: ` +
            COMMUNICATION.map(name => `${name} ${share(x, x.parts[name])}`).join(", ")],
        ["Idle", `${share(x, x.parts.idle)}, waiting for other stages`],
        ["Where this is from", `the planner's simulation, with dev/clusters/${v.cluster}.json; ` +
                               `shares of stage ${x.slowest}, which computes most`]]);
    $("same").textContent = `build/tools/plan --light ${timeQuestion(v).flags}`;
    $("samebox").hidden = false;
    $("parttimes").parentElement.hidden = false;
    drawTimeParts();
}

// Draws one bar of the slowest stage's step. Each part is named in it or, if it is narrow, below
// it.
function drawTimeParts() {
    const colors = {
        GEMM: "#2c5f9e",
        attention: "#1f7a5c",
        memory: "#5c7320",
        tensor: "#6b3fa0",
        pipeline: "#a83c15",
        data: "#a3345a",
        optimizer: "#35687a",
        host: "#56616d",
        idle: null,
    };
    const width = roomFor(320), high = 34, g = paper($("parttimes"), width, MARGIN.top + high + 26);
    const scale = (width - 4) / timed.seconds, hatch = hatching(g), y = MARGIN.top + high / 2;
    let x = 2, free = 2;
    for (const [name, seconds] of Object.entries(timed.parts)) {
        const wide = Math.max(0, seconds) * scale, text = `${name} ${share(timed, seconds)}`;
        g.fillStyle = colors[name] || hatch;
        g.fillRect(x, MARGIN.top, Math.max(0, wide - (wide > 3 ? 1 : 0)), high);
        const long = 6.4 * text.length, middle = x + wide / 2;
        if (wide >= long + 8) {
            const color = colors[name] ? "#fff" : COLORS.text;
            if (!colors[name]) {
                g.fillStyle = COLORS.ground;
                g.fillRect(middle - 3.3 * text.length, y - 8, 6.6 * text.length, 16);
            }
            label(g, text, middle, y, {size: 12, align: "center", color});
        } else if (wide >= 1) {
            const at = Math.max(free, x);
            if (at + long < width) {
                g.fillStyle = COLORS.muted;
                g.fillRect(middle, MARGIN.top + high, 1, 5);
                label(g, text, at, MARGIN.top + high + 14, {size: 11, color: COLORS.muted});
                free = at + long + 12;
            }
        }
        x += wide;
    }
    const shares = Object.entries(timed.parts).map(([name, seconds]) =>
        `${name} ${share(timed, seconds)}`);
    $("parttimes").setAttribute("aria-label", "parts of a step: " + shares.join(", "));
}

// ---- the search ---------------------------------------------------------------------------------

let searching = false, searchedFor = null, best = [];  // the question whose answer stands there

// Removes the result of a search when the model, the cluster, the number of GPUs or the batch
// changes.
function showSearchOf(values) {
    const now = wishFlags(values) + clusterText(values);
    if (searchedFor === now) return;
    askSearch.end();
    searchedFor = null;
    $("best").replaceChildren();
    $("searched").textContent =
        `the ten fastest of all layouts of ${gpusOf(values)} GPUs that the trainers accept`;
}

async function search() {
    if (!laid) return;
    if (trainerOf(laid.values) === 3) {
        $("searched").textContent =
            "this page searches layouts without c and e; build/tools/plan, in a terminal, all";
        return;
    }
    if (searching) return askSearch.end();
    const values = laid.values, flags = wishFlags(values), begin = performance.now();
    searching = true;
    searchedFor = wishFlags(values) + clusterText(values);
    $("search").textContent = "stop";
    $("searched").textContent = "working...";
    $("best").replaceChildren();
    try {
        const {counts, rows} = await askSearch("search", {cluster: clusterText(values), flags},
                                               line => { $("searched").textContent = line; });
        const took = ((performance.now() - begin) / 1000).toFixed(1);
        $("searched").textContent = `${counts}. It took ${took} s. A button loads its layout. In ` +
            `a terminal: build/tools/plan ${flags} (which also asks the trainers' clock)`;
        showBest(rows, values);
        best = rows;
    } catch (e) {
        if (e.message === "superseded") searchedFor = null, showSearchOf(laid.values);
        else $("searched").textContent = e.message;
    }
    searching = false;
    $("search").textContent = "search";
}

// Returns the fields of a row of the planner's.
function rowValues(row, values) {
    return {
        ...values, tensor: row.t, data: row.d, pipeline: row.p, virtual: row.v, micro: row.micro,
        recompute: RECOMPUTES[row.recompute], order: ORDERS[row.order], sp: row.sp,
        zero: row.d > 1 ? row.zero : 1, limit: row.limit || "",
        schedule: row.v > 1 || row.p === 1 ? "" : KINDS[row.schedule],
    };
}

function showBest(rows, values) {
    const names = ["layout", "step", "tokens/s", "MFU", "memory", "idle", "exposed"];
    $("best").replaceChildren(tableRow("th", names, [], "col"), ...rows.map(row => {
        const name = row.flags.replace(/--/g, "").trim(), button = document.createElement("button");
        button.type = "button";
        button.textContent = name;
        button.onclick = () => {
            const fields = Object.entries(rowValues(row, values));
            const to = Object.fromEntries(fields.map(([k, x]) => [k, String(x)]));
            take("layout", to);
        };
        const sharded = row.shard > 0;  // no fields here choose it
        return tableRow("td", [
            sharded ? name + " (train_fsdp)" : button,
            secondsText(row.seconds),
            countText(tokensOf(values) / row.seconds),
            (100 * row.mfu).toFixed(1) + "%",
            bytesText(row.memory),
            share(row, row.parts.idle),
            share(row, exposed(row)),
        ], names);
    }));
}

$("search").onclick = search;
