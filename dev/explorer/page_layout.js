// ---- layout -------------------------------------------------------------------------------------

const SWITCHES = {
    layers: "layers",
    heads: "heads",
    channels: "channels",
    vocab: "vocab",
    seq: "seq",
    tensor: "tensor",
    data: "data",
    pipeline: "pipeline",
    virtual: "virtual",
    micro: "micro-batch",
    global: "global-batch",
    schedule: "schedule",
    limit: "max-in-flight",
    recompute: "recompute",
    order: "order",
    sp: "sequence-parallel",
    zero: "zero",
    context: "context",
    expert: "expert-parallel",
    capacity: "capacity",
};
const MOST_RANKS = 16384;
let laid = null;

// Returns the trainer's flags for these values. An empty field leaves its flag out.
function flagsOf(values) {
    const llama = LLAMAS[values.model];
    let flags = llama ? " --model " + values.model : "";
    for (const [field, flag] of Object.entries(SWITCHES)) {
        const named = llama && field !== "seq" ? llama[MODEL_FIELDS.indexOf(field)] : undefined;
        const word = values[field].trim();
        if (values[field] === String(named)) continue;  // the name says it
        if (word === "" || (field === "recompute" && values[field] === "none")) continue;
        const usual = {order: "tdp", sp: "0", zero: "1", virtual: "1", context: "1", expert: "1"};
        if (values[field] === usual[field]) continue;
        if (/\s/.test(word)) throw new Error(`--${flag} takes one word, not '${values[field]}'`);
        flags += ` --${flag} ${word}`;
    }
    return flags;
}

// The trainers, as the C numbers them: train_zero_bubble runs the schedules with a split backward.
const TRAINERS = ["train_gpt_3d", "train_zero_bubble", "train_llama", "train_5d"];
const isCut = values => ["context", "expert"].some(name => !["1", ""].includes(values[name]));
function trainerOf(values) {
    if (Object.hasOwn(MIXTURES, values.model)) return 3;
    if (Object.hasOwn(LLAMAS, values.model)) return isCut(values) ? 3 : 2;
    return Number(values.schedule.trim().startsWith("zb-"));
}
function sourceOf(values) {
    const trainer = trainerOf(values);
    return (trainer ? "dev/lessons/" : "") + TRAINERS[trainer] + ".cu";
}

// Returns the question to the C for these values.
function layoutQuestion(values) {
    const size = name => {
        const known = /^[0-9]{1,7}$/.test(values[name].trim());
        return known ? Math.max(1, Number(values[name])) : 1;
    };
    const t = size("tensor"), d = size("data"), p = size("pipeline");
    const ranks = t * d * p, cluster = CLUSTERS[values.cluster];
    if (ranks > MOST_RANKS)
        throw new Error(`${ranks} ranks are more than this page draws: ${MOST_RANKS} are the most`);
    const node = values.node === "" ? cluster.gpus_per_node
                                    : number(values, "node", "GPUs a node", 1, 1e6, true);
    const trainer = trainerOf(values);
    if (trainer < 2 && isCut(values))
        throw new Refusal("context", "c and e are train_5d's: choose a model of Llama's kind, " +
                                     "such as llama-3.1-8b, or one with experts, such as " +
                                     "mixtral-8x7b");
    if (trainer === 3 && values.precision !== "bf16")
        throw new Refusal("precision", "precision: this page has train_5d in bf16 only");
    const line = (flagsOf(values) + " --dry-run").trim();
    const rank = rankShown < ranks ? rankShown : 0;
    return {line, t, d, p, node, trainer, precision: values.precision, rank};
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
    return () => {
        laid = r;
        showLayout();
        openStage(stageShown !== null && stageShown < r.p ? stageShown : null);
    };
}

const PARTS = [
    ["weights", "#2c5f9e"],
    ["gradients", "#1f7a5c"],
    ["optimizer", "#8a5ac2"],
    ["activations", "#e3a33b"],
    ["libraries", "#c2c9d1"],
];
const stageBytes = (r, s) => s.weights + s.gradients + s.optimizer + s.activations + r.reserve;
const fullestOf = r => Math.max(...r.stages.map(s => stageBytes(r, s)));
const sentByRank = r => r.all.flat().reduce((sum, x) => sum + x.sent, 0) / r.ranks;

function showLayout() {
    const r = laid, v = r.values, fullest = fullestOf(r);
    if (!(rankShown >= 0 && rankShown < r.ranks)) rankShown = 0;
    const launch = r.ranks > 1 ? `mpirun -n ${r.ranks} ` : "";
    const trainer = `build/cuda-${v.precision}/${TRAINERS[trainerOf(v)]}`;
    const line = `${launch}${trainer} --train-data 'data/train_*.bin'${r.flags}`;
    // A line breaks between flags.
    $("command").replaceChildren(...line.split(" --").flatMap((word, i) => {
        const span = document.createElement("span");
        span.textContent = (i ? "--" : "") + word;
        return i ? [" ", span] : [span];
    }));
    const nodes = Math.ceil(r.ranks / r.node), fits = fullest <= r.memory;
    const ranks = `${r.ranks} = ${r.t} tensor x ${r.d} data x ${r.p} pipeline`;
    const within = [[v.context, "a sequence"], [v.expert, "the experts"]].map(([size, what]) =>
        size === "1" ? "" : `; ${size} neighbouring data ranks share ${what}`).join("");
    const formula = `; formula of equal chunks ${percent(r.formula)}`;
    const rows = [["Parameters", countText(r.parameters)],
                  ["Ranks", `${ranks}, on ${plural(nodes, "node")}${within}`],
                  ["A step", `${plural(r.micros, "micro-batch")} on each data rank, ` +
                             `${flopsText(r.flops)} in all`],
                  ["Memory", `${bytesText(fullest)} of ${bytesText(r.memory)} on the fullest ` +
                             `stage, with ${bytesText(r.reserve)} left to libraries: ` +
                             (fits ? "fits" : "does not fit")],
                  ["Bubble", `${percent(r.bubble)} of compute time, messages free` +
                             (Number.isNaN(r.formula) ? "" : formula)],
                  ["Sent", r.counted ? `${bytesText(sentByRank(r))} a rank and step on average`
                                     : "not counted: too many passes of a layer for this page"]];
    facts("sums", rows);
    legend("parts", PARTS.map(([name, color]) =>
        [color, name === "libraries" ? "left to libraries (the cluster file's reserve)" : name]));
    drawGrid();
    drawBytes();
    $("numbers").textContent = JSON.stringify({
        t: r.t, d: r.d, p: r.p, micros: r.micros, stages: r.stages, all: r.all, bubble: r.bubble,
        parameters: r.parameters, counted: r.counted, flags: r.flags, precision: v.precision,
        memory: r.memory, reserve: r.reserve, fits});
    showTime(r);
    showWhatIf(r);
    showSearchOf(v);
}

// ---- what if ------------------------------------------------------------------------------------

// Adds to a change the most chunks, not more than now, into which its layers and micro-batches
// divide.
function suited(values, change) {
    const v = {...values, ...change}, [p, L] = [Number(v.pipeline), Number(v.layers)];
    const m = Number(v.global) * Number(v.context) / (Number(v.micro) * Number(v.data));
    let chunks = Number(v.virtual);
    while (chunks > 1 && (p === 1 || L % (p * chunks) || m % p)) chunks--;
    return {...change, virtual: String(chunks)};
}

// Returns single changes: the name of each and the fields that it sets.
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
        const to = (mine, data) => suited(v, {[name]: mine(name), data: data("data")});
        if (Number(v.data) % 2 === 0) changes.push([`twice ${text}, half d`, to(twice, half)]);
        if (Number(v[name]) % 2 === 0) changes.push([`half ${text}, twice d`, to(half, twice)]);
    }
    for (const [name, text] of [["context", "c"], ["expert", "e"]]) {
        if (trainerOf(v) === 3) changes.push(["twice " + text, {[name]: twice(name)}]);
        if (Number(v[name]) % 2 === 0) changes.push(["half " + text, {[name]: half(name)}]);
    }
    for (const kind of ["gpipe", "1f1b", "zb-h1"]) {
        // An empty field is 1F1B.
        const another = kind !== "1f1b" || (v.schedule && v.virtual === "1");
        if (Number(v.pipeline) > 1 && v.schedule !== kind && another)
            changes.push([kind, {schedule: kind, virtual: "1", limit: ""}]);
    }
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
            const q = layoutQuestion(values);
            const other = await askWhatIf("layout", {...q, rank: Infinity});
            if (mine !== whatIf) return;
            other.ranks = r.ranks;
            other.reserve = r.reserve;
            const bytes = fullestOf(other), more = sentByRank(other) - sent, delta = bytes - now;
            const signed = x => x === 0 ? "the same"
                                        : (x > 0 ? "+" : "-") + bytesText(Math.abs(x));
            let verdict = bytes <= r.memory ? "fits" : "does not fit";
            if (r.values.precision === "bf16" && trainerOf(r.values) < 3 && trainerOf(values) < 3)
                verdict = await askWhatIf("beside", besideQuestion(r.values, values));
            if (mine !== whatIf) return;
            Object.assign(hints, {[Object.entries(change).join()]: signed(delta)});
            showHints(r.values, hints);
            const sends = r.counted && other.counted ? signed(more) : "not counted";
            const step = verdict.replace(/^([+-][\d.]+%), [\d.]+ GiB/, "$1");  // see its column
            cells = [signed(delta), sends, step];
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
    $("whatifdone").textContent = "Each line is the trainer's own plan of one change, and the " +
        "planner's answer to why not: refused, too large, or how much slower and by what. " +
        "A button makes the change.";
    fillCurves(r, () => mine === whatIf);
}

// Writes beside the switches what they would do to the fullest stage. hints: by the change,
// "zero,1".
function showHints(values, hints) {
    for (const name of ["zero", "sp"]) {
        const other = values[name] === "1" ? "0" : "1", bytes = hints[`${name},${other}`];
        const how = other === "1" ? "with" : "without";
        $("hint-" + name).textContent = bytes ? `${how} it: ${bytes}` : "";
    }
    for (const option of section("layout").querySelector("[name=recompute]").options) {
        const bytes = hints["recompute," + option.value];
        option.textContent = option.value + (bytes ? `: ${bytes}` : "");
    }
}

// Makes a row of a table. names: of the columns, for a narrow screen, where each row is a block.
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

// Returns the places of the ranks' cells: stages one under the other, data ranks side by side,
// tensor ranks in them.
function gridPlaces(r) {
    const width = roomFor(320) - MARGIN.left - 4, least = r.ranks > 4096 ? 6 : narrow() ? 24 : 9;
    let lines = 0, across, cell;  // a stage takes as many lines as its cells need to be seen
    do {
        across = Math.ceil(r.d / ++lines);
        const room = Math.floor((width - across * 5) / (across * r.t));
        cell = Math.min(38, Math.max(least, Math.floor(760 / r.p)), room);
    } while (cell < least && across > 1);
    cell = Math.max(cell, least);
    const block = r.t * cell + (cell > 12 ? 5 : 2);
    const between = lines > 1 ? 6 : cell > 12 ? 3 : 1, row = lines * (cell + 2) + between;
    const of = (t, d, p) => [MARGIN.left + (d % across) * block + t * cell,
                             MARGIN.top + p * row + Math.floor(d / across) * (cell + 2)];
    const high = MARGIN.top + r.p * row + 4;
    return {cell, row, of, width: MARGIN.left + across * block + 4, height: high};
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
        const {t, d, p} = placeOf(r, rank), [x, y] = at.of(t, d, p);
        const node = Math.floor(rank / r.node);
        const hue = node * 137.5 % 360, saturation = 55 + node % 3 * 10;
        const color = `hsl(${hue}, ${saturation}%, ${COLORS.node - node % 2 * 6}%)`;
        g.fillStyle = nodes > 1 ? color : COLORS.share;
        g.fillRect(x, y, at.cell - 1, at.cell - 1);
        r.cells.set(`${t},${d},${p}`, rank);
        if (at.cell >= 8 + 7 * String(r.ranks - 1).length) {
            const half = at.cell / 2;
            label(g, String(rank), x + half - 0.5, y + half, {size: 11, align: "center"});
        }
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
    // Groups of some data ranks, as the trainer makes them: a square in a corner of each cell.
    const within = {context: ["context", COLORS.focus, 0, 0],
                    experts: ["experts", COLORS.experts, 0, 1],
                    "expert data": ["same experts", COLORS.alike, 1, 1]};
    const size = Math.max(2, Math.floor(at.cell / 4)), free = at.cell - 3 - size;
    for (const [group, [name, color, right, down]] of Object.entries(within)) {
        const ranks = r.chosen.groups[GROUPS.indexOf(group)];
        if (!ranks) continue;
        colors[name] = color;
        groups[name] = ranks;
        g.fillStyle = color;
        for (const rank of ranks) {
            const {t, d, p} = placeOf(r, rank), [x, y] = at.of(t, d, p);
            g.fillRect(x + 1 + right * free, y + 1 + down * free, size, size);
        }
    }
    const [x, y] = at.of(mine.t, mine.d, mine.p);
    g.strokeStyle = COLORS.text;
    g.lineWidth = at.cell > 12 ? 4 : 2;
    g.strokeRect(x + 1, y + 1, at.cell - 3, at.cell - 3);
    r.at = at;
    const names = Object.entries(colors).flatMap(([name, color]) => {
        const b = document.createElement("b");
        b.style.color = color;
        const list = groups[name], few = Number.isInteger(list[0]) && list.length < 17;
        b.textContent = `${name} (${list.length}${few ? ": " + list.join(" ") : ""})`;
        return [", ", b];
    });
    const place = `tensor ${mine.t}, data ${mine.d}, stage ${mine.p}`;
    const needed = bytesText(stageBytes(r, r.chosen.bytes));
    $("chosen").replaceChildren(
        `Rank ${rankShown}: ${place}, node ${Math.floor(rankShown / r.node)}. It holds ` +
        `${r.chosen.holds}. Its groups: `, ...names.slice(1),
        `. It needs ${needed}. Choose another by a click or the arrow keys.`);
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

// Draws the bytes. The scale ends at the device's memory, unless the layout needs less than a third
// of it.
function drawBytes() {
    const r = laid, width = roomFor(360), row = bytesRow(r);
    const fullest = fullestOf(r), small = fullest < r.memory / 3;
    const most = small ? fullest : Math.max(r.memory, fullest);
    const right = width < 600 ? 84 : 150, scale = (width - MARGIN.left - right) / most;
    const gap = row > 12 ? 4 : 1, every = Math.ceil(13 / row), top = bytesTop;
    const g = paper($("bytes"), width, top + r.p * row + 6);
    const limit = small ? 0 : MARGIN.left + r.memory * scale;
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
        const total = stageBytes(r, s);
        const layers = right > 100 && row > 12 ? `, ${plural(s.layers, "layer")}` : "";
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
    context: "ranks of a sequence", "context sums": "ranks of a sequence",
    experts: "ranks that share the experts", "expert data": "ranks with the same experts",
};

function showSent() {
    const r = laid, mine = r.counted ? r.chosen.sent : null;
    const names = ["who, what", `calls of rank ${rankShown}`, "it sends", "all ranks send",
                   "between nodes"];
    const rows = [];
    GROUPS.forEach((group, g) => OPS.forEach((op, o) => {
        const all = r.all[g][o];
        if (!mine || !all.sent) return;
        const share = Math.round(100 * all.across / all.sent);
        rows.push(tableRow("td", [
            `${GROUP_USES[group]}, ${op}`,
            String(mine[g][o].calls),
            bytesText(mine[g][o].sent),
            bytesText(all.sent),
            `${bytesText(all.across)} (${share}%)`,
        ], ["", ...names.slice(1)]));
    }));
    const none = r.counted ? "nothing: there is one rank" : "not counted";
    if (!rows.length) rows.push(tableRow("td", [none], []));
    else rows.unshift(tableRow("th", names, [], "col"));
    $("sent").replaceChildren(...rows);
}

