// ---- layout ---------------------------------------------------------------------------------------------------------

const SWITCHES = {layers: "layers", heads: "heads", channels: "channels", vocab: "vocab", seq: "seq", tensor: "tensor",
                  data: "data", pipeline: "pipeline", virtual: "virtual", micro: "micro-batch", global: "global-batch",
                  schedule: "schedule", limit: "max-in-flight", recompute: "recompute", order: "order",
                  sp: "sequence-parallel", zero: "zero"};
const MOST_RANKS = 16384;
let laid = null;

// The trainer's flags for these values. A field that is empty leaves its flag out, as one may.
function flagsOf(values) {
    const llama = LLAMAS[values.model];
    let flags = llama ? " --model " + values.model : "";
    for (const [field, flag] of Object.entries(SWITCHES)) {
        const named = llama && field !== "seq" ? llama[MODEL_FIELDS.indexOf(field)] : undefined;
        if (values[field] === String(named)) continue;  // the name says it
        if (values[field].trim() === "" || (field === "recompute" && values[field] === "none")) continue;
        if (values[field] === {order: "tdp", sp: "0", zero: "1", virtual: "1"}[field]) continue;
        if (/\s/.test(values[field].trim())) throw new Error(`--${flag} takes one word, not '${values[field]}'`);
        flags += ` --${flag} ${values[field].trim()}`;
    }
    return flags;
}

// The trainers, as the C numbers them: train_zero_bubble runs the schedules with a split backward.
const TRAINERS = ["train_gpt_3d", "train_zero_bubble", "train_llama"];
const trainerOf = values => Object.hasOwn(LLAMAS, values.model) ? 2 : Number(values.schedule.trim().startsWith("zb-"));
const sourceOf = values => (trainerOf(values) ? "dev/lessons/" : "") + TRAINERS[trainerOf(values)] + ".cu";

// What the C is asked for these values.
function layoutQuestion(values) {
    const size = name => /^[0-9]{1,7}$/.test(values[name].trim()) ? Math.max(1, Number(values[name])) : 1;
    const t = size("tensor"), d = size("data"), p = size("pipeline"), cluster = CLUSTERS[values.cluster];
    if (t * d * p > MOST_RANKS)
        throw new Error(`${t * d * p} ranks are more than this page draws: ${MOST_RANKS} are the most`);
    const node = values.node === "" ? cluster.gpus_per_node
                                    : number(values, "node", "GPUs a node", 1, 1e6, true);
    return {line: (flagsOf(values) + " --dry-run").trim(), t, d, p, node, trainer: trainerOf(values),
            precision: values.precision, rank: rankShown < t * d * p ? rankShown : 0};
}

async function runLayout(values) {
    choose(values, "cluster", "cluster", Object.keys(CLUSTERS));
    choose(values, "precision", "precision", ["bf16", "fp32"]);
    if (values.model !== "") choose(values, "model", "model", Object.keys(MODELS));
    const memory = values.memory === "" ? CLUSTERS[values.cluster].memory
                                        : 1e9 * number(values, "memory", "GB of a GPU", 0.1, 1e6);
    const q = layoutQuestion(values), r = await ask("layout", q);
    Object.assign(r, {t: q.t, d: q.d, p: q.p, node: q.node, ranks: q.t * q.d * q.p, memory, values,
                      flags: flagsOf(values), question: q});
    r.reserve = CLUSTERS[values.cluster].reserve;
    r.place = rank => r.places[rank];
    r.rank = rank => askAside("rank", {...q, rank});
    return () => { laid = r; showLayout(); openStage(stageShown !== null && stageShown < r.p ? stageShown : null); };
}

const PARTS = [["weights", "#2c5f9e"], ["gradients", "#1f7a5c"], ["optimizer", "#8a5ac2"], ["activations", "#e3a33b"],
               ["libraries", "#c2c9d1"]];
const stageBytes = (r, s) => s.weights + s.gradients + s.optimizer + s.activations + r.reserve;
const fullestOf = r => Math.max(...r.stages.map(s => stageBytes(r, s)));
const sentByRank = r => r.all.flat().reduce((sum, x) => sum + x.sent, 0) / r.ranks;

function showLayout() {
    const r = laid, v = r.values, fullest = fullestOf(r);
    if (!(rankShown >= 0 && rankShown < r.ranks)) rankShown = 0;
    const launch = r.ranks > 1 ? `mpirun -n ${r.ranks} ` : "";
    const line = `${launch}build/cuda-${v.precision}/${TRAINERS[trainerOf(v)]} --train-data 'data/train_*.bin'${r.flags}`;
    $("command").replaceChildren(...line.split(" --").flatMap((word, i) => {  // a line breaks between flags
        const span = document.createElement("span");
        span.textContent = (i ? "--" : "") + word;
        return i ? [" ", span] : [span];
    }));
    const nodes = Math.ceil(r.ranks / r.node), fits = fullest <= r.memory;
    const rows = [["Parameters", countText(r.parameters)],
                  ["Ranks", `${r.ranks} = ${r.t} tensor x ${r.d} data x ${r.p} pipeline, on ${plural(nodes, "node")}`],
                  ["A step", `${plural(r.micros, "micro-batch")} on each data rank, ` +
                             `${flopsText(r.flops)} in all`],
                  ["Memory", `${bytesText(fullest)} of ${bytesText(r.memory)} on the fullest stage, with ` +
                             `${bytesText(r.reserve)} left to libraries: ${fits ? "fits" : "does not fit"}`],
                  ["Bubble", `${percent(r.bubble)} of compute time, messages free` +
                             (Number.isNaN(r.formula) ? "" : `; formula of equal chunks ${percent(r.formula)}`)],
                  ["Sent", r.counted ? `${bytesText(sentByRank(r))} a rank and step on average`
                                     : "not counted: too many passes of a layer for this page"]];
    facts("sums", rows);
    legend("parts", PARTS.map(([name, color]) =>
        [color, name === "libraries" ? "left to libraries (the cluster file's reserve)" : name]));
    drawGrid();
    drawBytes();
    $("numbers").textContent = JSON.stringify({t: r.t, d: r.d, p: r.p, micros: r.micros, stages: r.stages, all: r.all,
        bubble: r.bubble, parameters: r.parameters, counted: r.counted, flags: r.flags, precision: v.precision,
        memory: r.memory, reserve: r.reserve, fits});
    showTime(r);
    showWhatIf(r);
    showSearchOf(v);
}

// ---- what if --------------------------------------------------------------------------------------------------------

// Adds to a change the most chunks, not more than now, into which its layers and micro-batches divide.
function suited(values, change) {
    const v = {...values, ...change}, [p, L] = [Number(v.pipeline), Number(v.layers)];
    const m = Number(v.global) / (Number(v.micro) * Number(v.data));
    let chunks = Number(v.virtual);
    while (chunks > 1 && (p === 1 || L % (p * chunks) || m % p)) chunks--;
    return {...change, virtual: String(chunks)};
}

// One change each: its name and the fields that it sets.
function changesOf(v) {
    const changes = [];
    if (v.zero !== "1") changes.push(["ZeRO-1", {zero: "1"}]);
    else changes.push(["no ZeRO", {zero: "0"}]);
    if (Number(v.tensor) > 1) changes.push(v.sp === "1" ? ["no sequence parallelism", {sp: "0"}]
                                                        : ["sequence parallelism", {sp: "1"}]);
    for (const kind of ["none", "gelu", "layer"])
        if (kind !== v.recompute) changes.push(["recompute " + kind, {recompute: kind}]);
    const twice = name => String(2 * Number(v[name])), half = name => String(Number(v[name]) / 2);
    for (const [name, text] of [["tensor", "t"], ["pipeline", "p"]]) {
        if (Number(v.data) % 2 === 0)
            changes.push([`twice ${text}, half d`, suited(v, {[name]: twice(name), data: half("data")})]);
        if (Number(v[name]) % 2 === 0)
            changes.push([`half ${text}, twice d`, suited(v, {[name]: half(name), data: twice("data")})]);
    }
    for (const kind of ["gpipe", "1f1b", "zb-h1"])
        if (Number(v.pipeline) > 1 && v.schedule !== kind && (kind !== "1f1b" || (v.schedule && v.virtual === "1")))
            changes.push([kind, {schedule: kind, virtual: "1", limit: ""}]);
    return changes;
}

// Fills the table of changes one by one, each by the trainer's own plan; a new layout ends it.
let whatIf = 0;
async function showWhatIf(r) {
    const mine = ++whatIf, table = $("whatif");
    const now = fullestOf(r), sent = sentByRank(r), hints = {};
    const names = ["change", "fullest stage", "sent a rank", "step"];
    table.replaceChildren(tableRow("th", names, [], "col"));
    $("whatifdone").textContent = "working...";
    delete $("curves").dataset.done;  // they are of another layout
    showHints(r.values, {});
    for (const [name, change] of changesOf(r.values)) {
        const values = {...r.values, ...change};
        let cells;
        try {
            const q = layoutQuestion(values), other = await askWhatIf("layout", {...q, rank: Infinity});
            if (mine !== whatIf) return;
            other.ranks = r.ranks, other.reserve = r.reserve;
            const bytes = fullestOf(other), more = sentByRank(other) - sent, delta = bytes - now;
            const signed = x => x === 0 ? "the same" : (x > 0 ? "+" : "-") + bytesText(Math.abs(x));
            const verdict = r.values.precision === "bf16" ? await askWhatIf("beside", besideQuestion(r.values, values))
                                                          : bytes <= r.memory ? "fits" : "does not fit";
            const step = verdict.replace(/^([+-][\d.]+%), [\d.]+ GiB/, "$1");  // its memory has a column
            if (mine !== whatIf) return;
            Object.assign(hints, {[Object.entries(change).join()]: signed(delta)});
            showHints(r.values, hints);
            cells = [signed(delta), r.counted && other.counted ? signed(more) : "not counted", step];
        } catch (e) {
            if (mine !== whatIf || e.message === "superseded") return;
            cells = ["", "", "the trainer refuses: " + e.message];
        }
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = name;
        button.onclick = () => take("layout", values);
        table.append(tableRow("td", [button, ...cells], names));
    }
    $("whatifdone").textContent = "Each line is the trainer's own plan of one change, and the planner's answer to " +
        "why not: refused, too large, or how much slower and by what. A button makes the change.";
    fillCurves(r, () => mine === whatIf);
}

// Writes beside the switches what they would do to the fullest stage. hints: by the change, "zero,1".
function showHints(values, hints) {
    for (const name of ["zero", "sp"]) {
        const other = values[name] === "1" ? "0" : "1", bytes = hints[`${name},${other}`];
        $("hint-" + name).textContent = bytes ? `${other === "1" ? "with" : "without"} it: ${bytes}` : "";
    }
    for (const option of section("layout").querySelector("[name=recompute]").options) {
        const bytes = hints["recompute," + option.value];
        option.textContent = option.value + (bytes ? `: ${bytes}` : "");
    }
}

// names: of the columns, for a narrow screen, where each row is a block.
function tableRow(tag, cells, names, scope) {
    const tr = document.createElement("tr");
    tr.append(...cells.map((content, i) => {
        const cell = document.createElement(tag);
        if (scope) cell.scope = scope;
        if (names[i]) cell.dataset.name = names[i];
        cell.append(content);
        return cell;
    }));
    return tr;
}

// Returns the places of the ranks' cells: stages one under the other, data ranks side by side, tensor ranks in them.
function gridPlaces(r) {
    const width = roomFor(320) - MARGIN.left - 4, least = r.ranks > 4096 ? 6 : narrow() ? 24 : 9;
    let lines = 0, across, cell;  // a stage takes as many lines as its cells need to be seen
    do {
        across = Math.ceil(r.d / ++lines);
        cell = Math.min(38, Math.max(least, Math.floor(760 / r.p)), Math.floor((width - across * 5) / (across * r.t)));
    } while (cell < least && across > 1);
    cell = Math.max(cell, least);
    const block = r.t * cell + (cell > 12 ? 5 : 2), row = lines * (cell + 2) + (lines > 1 ? 6 : cell > 12 ? 3 : 1);
    const of = (t, d, p) => [MARGIN.left + (d % across) * block + t * cell,
                             MARGIN.top + p * row + Math.floor(d / across) * (cell + 2)];
    return {cell, row, of, width: MARGIN.left + across * block + 4, height: MARGIN.top + r.p * row + 4};
}

const placeOf = (r, rank) => {
    const place = r.place(rank), t = place % r.t, d = Math.floor(place / r.t) % r.d;
    return {t, d, p: Math.floor(place / r.t / r.d)};
};

function drawGrid() {
    const r = laid, at = gridPlaces(r), g = paper($("grid"), Math.max(at.width, 200), at.height);
    const mine = placeOf(r, rankShown), nodes = Math.ceil(r.ranks / r.node);
    const groups = {tensor: [], data: [], pipeline: []};
    r.cells = new Map();
    for (let rank = 0; rank < r.ranks; rank++) {
        const {t, d, p} = placeOf(r, rank), [x, y] = at.of(t, d, p), node = Math.floor(rank / r.node);
        const color = `hsl(${node * 137.5 % 360}, ${55 + node % 3 * 10}%, ${COLORS.node - node % 2 * 6}%)`;
        g.fillStyle = nodes > 1 ? color : COLORS.share;
        g.fillRect(x, y, at.cell - 1, at.cell - 1);
        r.cells.set(`${t},${d},${p}`, rank);
        if (at.cell >= 8 + 7 * String(r.ranks - 1).length)
            label(g, String(rank), x + at.cell / 2 - 0.5, y + at.cell / 2, {size: 11, align: "center"});
        if (d === mine.d && p === mine.p) groups.tensor.push([x, y]);
        if (t === mine.t && p === mine.p) groups.data.push([x, y]);
        if (t === mine.t && d === mine.d) groups.pipeline.push([x, y]);
    }
    labelStages(g, r.p, at.row, at.cell, MARGIN.top);
    const colors = {tensor: COLORS.violet, data: COLORS.data, pipeline: COLORS.orange};
    for (const [name, cells] of Object.entries(groups)) {
        g.strokeStyle = colors[name];
        g.lineWidth = at.cell > 12 ? 3 : 2;
        const inset = at.cell > 12 ? 1.5 : 0.5;
        const side = at.cell - 1 - 2 * inset;
        for (const [x, y] of cells) g.strokeRect(x + inset, y + inset, side, side);
    }
    const [x, y] = at.of(mine.t, mine.d, mine.p);
    g.strokeStyle = COLORS.text;
    g.lineWidth = at.cell > 12 ? 4 : 2;
    g.strokeRect(x + 1, y + 1, at.cell - 3, at.cell - 3);
    r.at = at;
    $("chosen").replaceChildren(`Rank ${rankShown}: tensor ${mine.t}, data ${mine.d}, stage ${mine.p}, node ` +
        `${Math.floor(rankShown / r.node)}. Its groups: `, ...Object.entries(colors).flatMap(([name, color]) => {
            const b = document.createElement("b");
            b.style.color = color;
            b.textContent = `${name} (${groups[name].length})`;
            return [b, name === "pipeline" ? ". " : ", "];
        }), `It needs ${bytesText(stageBytes(r, r.chosen.bytes))}. Choose another by a click or the arrow keys.`);
    $("grid").setAttribute("aria-label", `grid of ${r.ranks} ranks; rank ${rankShown} is chosen`);
    showSent();
}

function moveRank(dt, dd, dp) {
    const r = laid, {t, d, p} = placeOf(r, rankShown);
    let flat = d * r.t + t + dt + dd * r.t;
    flat = Math.max(0, Math.min(r.t * r.d - 1, flat));
    const to = `${flat % r.t},${Math.floor(flat / r.t)},${Math.max(0, Math.min(r.p - 1, p + dp))}`;
    return chooseRank(r.cells.get(to));
}

async function chooseRank(rank) {
    const r = laid;
    rankShown = rank;
    try {
        const chosen = await r.rank(rank);
        if (laid !== r || rankShown !== rank) return;
        r.chosen = chosen;
    } catch (e) {
        return;  // another one was chosen meanwhile
    }
    drawGrid();
    keepAddress();
}

const bytesRow = r => Math.max(9, Math.min(30, Math.floor(520 / r.p))), bytesTop = MARGIN.top + 18;

// The scale ends at the device's memory, unless the layout needs less than a third of it.
function drawBytes() {
    const r = laid, width = roomFor(360), row = bytesRow(r);
    const fullest = fullestOf(r), small = fullest < r.memory / 3, most = small ? fullest : Math.max(r.memory, fullest);
    const right = width < 600 ? 84 : 150, scale = (width - MARGIN.left - right) / most;
    const gap = row > 12 ? 4 : 1, every = Math.ceil(13 / row), top = bytesTop;
    const g = paper($("bytes"), width, top + r.p * row + 6), limit = small ? 0 : MARGIN.left + r.memory * scale;
    labelStages(g, r.p, row, row - gap, top);
    r.stages.forEach((s, i) => {
        const y = top + i * row;
        let x = MARGIN.left;
        for (const [name, color] of PARTS) {
            const bytes = name === "libraries" ? r.reserve : s[name];
            g.fillStyle = color;
            g.fillRect(x, y, bytes * scale, row - gap);
            x += bytes * scale;
        }
        if (i === stageShown) {
            g.strokeStyle = COLORS.focus;
            g.lineWidth = 3;
            g.strokeRect(MARGIN.left - 1, y - 1, x - MARGIN.left + 2, row - gap + 2);
        }
        if (i !== r.p - 1 && (i % every || (r.p - 1 - i) * row < 13)) return;
        const total = stageBytes(r, s), layers = right > 100 && row > 12 ? `, ${plural(s.layers, "layer")}` : "";
        label(g, bytesText(total) + layers, Math.max(x, limit) + 8, y + (row - gap) / 2,
              {color: total > r.memory ? COLORS.orange : COLORS.text, bold: total > r.memory});
    });
    if (small) {
        const times = (r.memory / fullest).toFixed(1);
        label(g, `a GPU has ${bytesText(r.memory)}, ${times} times the longest bar`, MARGIN.left,
              MARGIN.top + 6, {color: COLORS.muted});
    } else {
        g.fillStyle = COLORS.orange;
        g.fillRect(limit, top - 4, 2, r.p * row + 4);
        label(g, bytesText(r.memory), limit + 1, MARGIN.top + 6,
              {color: COLORS.orange, align: r.memory * scale > 40 ? "right" : "left"});
    }
    $("bytes").setAttribute("aria-label", "bytes of each stage: " + r.stages.map(s =>
        bytesText(stageBytes(r, s))).join(", "));
}

const GROUP_USES = {
    world: "all ranks: gradient norm and loss", tensor: "tensor ranks", data: "data ranks",
    pipeline: "neighbouring stages", embedding: "first and last stage: the tied embedding",
};

function showSent() {
    const r = laid, mine = r.counted ? r.chosen.sent : null;
    const names = ["who, what", `calls of rank ${rankShown}`, "it sends", "all ranks send", "between nodes"], rows = [];
    GROUPS.forEach((group, g) => OPS.forEach((op, o) => {
        const all = r.all[g][o];
        if (!mine || !all.sent) return;
        rows.push(tableRow("td", [`${GROUP_USES[group]}, ${op}`, String(mine[g][o].calls), bytesText(mine[g][o].sent),
            bytesText(all.sent), `${bytesText(all.across)} (${Math.round(100 * all.across / all.sent)}%)`],
            ["", ...names.slice(1)]));
    }));
    if (!rows.length) rows.push(tableRow("td", [r.counted ? "nothing: there is one rank" : "not counted"], []));
    else rows.unshift(tableRow("th", names, [], "col"));
    $("sent").replaceChildren(...rows);
}

