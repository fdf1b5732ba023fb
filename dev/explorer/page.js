"use strict";
// page.js: fields, pictures and the address. Every number comes from the C in WASM; this draws it.

const $ = id => document.getElementById(id);
const PANELS = ["schedules", "layout", "collectives"];
const KINDS = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-auto", "list"];
const GROUPS = ["world", "tensor", "data", "pipeline", "embedding"];
const OPS = ["all-reduce", "reduce-scatter", "all-gather", "broadcast", "send", "receive"];
const COLORS = {  // as build/tools/timeline and figures draw them: dark and light of the chunks
    forward: ["#2c5f9e", "#a9cdf2"], backward: ["#1f7a5c", "#9fe0c4"], weight: ["#7d9a2e", "#d3e3a0"],
    send: "#d9632f", receive: "#f0bd9f", ink: "#1f2933", muted: "#66727f", grid: "#e3e8ee", violet: "#6b3fa0",
    orange: "#b8431a", share: "#bcd8f5", tokens: "#bfe8d6",
};
const STEPS = ["forward", "backward", "weight"];

// First values of the fields. The address names only what differs.
const DEFAULTS = {
    schedules: {kind: "1f1b", p: "4", m: "8", v: "1", limit: "", F: "1", B: "1", W: "1", transfer: "0", layers: "",
                buffers: "2", one: "0", list: "F0 F1 B0 W0 B1 W1\nF0 B0 F1 B1 W0 W1"},
    layout: {model: "", layers: "36", heads: "32", channels: "4096", vocab: "51200", seq: "2048", tensor: "4",
             data: "8", pipeline: "2", virtual: "1", micro: "2", global: "128", schedule: "", recompute: "layer",
             order: "tdp", precision: "bf16", node: "8", memory: "80", sp: "1", zero: "1"},
    collectives: {op: "all-reduce", n: "4", size: "64"},
};
// The trainers' presets of --model, and Table 1 of PTD-P (Narayanan et al. 2021): layers, heads, channels, vocabulary,
// T; tensor, data, pipeline, chunks, micro-batch, global batch.
const MODELS = {
    "GPT-2 small": [12, 12, 768, 50257, 1024], "GPT-2 medium": [24, 16, 1024, 50257, 1024],
    "GPT-2 large": [36, 20, 1280, 50257, 1024], "GPT-2 XL": [48, 25, 1600, 50257, 1024],
    "ptd 1.7B": [24, 24, 2304, 51200, 2048, 1, 32, 1, 1, 16, 512],
    "ptd 3.6B": [30, 32, 3072, 51200, 2048, 2, 32, 1, 1, 16, 512],
    "ptd 7.5B": [36, 32, 4096, 51200, 2048, 4, 32, 1, 1, 16, 512],
    "ptd 18B": [40, 48, 6144, 51200, 2048, 8, 32, 1, 1, 8, 1024],
    "ptd 39B": [48, 64, 8192, 51200, 2048, 8, 32, 2, 1, 4, 1536],
    "ptd 76B": [60, 80, 10240, 51200, 2048, 8, 32, 4, 3, 2, 1792],
    "ptd 145B": [80, 96, 12288, 51200, 2048, 8, 24, 8, 2, 2, 2304],
    "ptd 310B": [96, 128, 16384, 51200, 2048, 8, 15, 16, 2, 1, 2160],
    "ptd 530B": [105, 128, 20480, 51200, 2048, 8, 9, 35, 3, 1, 2520],
    "ptd 1T": [128, 160, 25600, 51200, 2048, 8, 6, 64, 1, 1, 3072],
};
const MODEL_FIELDS = ["layers", "heads", "channels", "vocab", "seq", "tensor", "data", "pipeline", "virtual", "micro",
                      "global"];
const MODEL_COUNT = 5;  // of these, the model's own

// ---- the C ----------------------------------------------------------------------------------------------------------

const compiled = WebAssembly.compile(Uint8Array.from(atob(WASM), c => c.charCodeAt(0)));

class Exit extends Error {}

// A fresh program: its memory is empty, and is freed with the last reference.
async function program() {
    const exit = code => { throw new Exit(String(code)); };
    const instance = await WebAssembly.instantiate(await compiled,
        {env: {pow: Math.pow, cos: Math.cos, exit: exit, _exit: exit}});
    const c = instance.exports;
    return {
        c: c,
        text(symbol) {
            const bytes = new Uint8Array(c.memory.buffer, symbol.value);
            return new TextDecoder().decode(bytes.subarray(0, bytes.indexOf(0)));
        },
        write(symbol, text) {
            const bytes = new TextEncoder().encode(text);
            if (bytes.length >= 1 << 20) throw new Error("the text is too long for this page");
            new Uint8Array(c.memory.buffer).set([...bytes, 0], symbol.value);
        },
        doubles: (at, count) => new Float64Array(c.memory.buffer, at, count),
        ints: (at, count) => new Int32Array(c.memory.buffer, at, count),
        // Calls, and makes the trainer's sentence an exception when it exits.
        call(name, ...args) {
            try {
                return c[name](...args);
            } catch (e) {
                if (!(e instanceof Exit)) throw new Error("this is too large for the page: " + e.message);
                throw new Error(this.text(c.stderr_text).replace(/^error: /, "").trim());
            }
        },
    };
}

// A program that nothing drawn belongs to. Two are enough for schedules, whose memory is used again.
const spare = [];
async function spareProgram() {
    if (!spare.length) spare.push(await program());
    return spare.find(c => c !== (shown && shown.program)) || (spare.push(await program()), spare[spare.length - 1]);
}

// ---- fields and the address -----------------------------------------------------------------------------------------

const state = structuredClone(DEFAULTS);  // what is drawn; fields may hold something else, which was refused
const section = panel => $("panel-" + panel);
const fields = panel => [...section(panel).querySelectorAll("form [name]")];
const valueOf = field => field.type === "checkbox" ? (field.checked ? "1" : "0") : field.value;

function fillFields(panel, values) {
    for (const field of fields(panel)) {
        if (field.type === "checkbox") field.checked = values[field.name] === "1";
        else if (field.value !== values[field.name]) field.value = values[field.name];
        field.classList.remove("bad");
    }
    showFields(panel, values);
}

function showFields(panel, values) {
    if (panel !== "schedules") return;
    const list = values.kind === "list", form = section(panel).querySelector("form");
    for (const label of form.querySelectorAll(".list")) label.classList.toggle("hidden", !list);
    for (const label of form.querySelectorAll(".sized")) label.classList.toggle("hidden", list);
    for (const label of form.querySelectorAll(".auto")) label.classList.toggle("hidden", values.kind !== "zb-auto");
    $("write").classList.toggle("hidden", list);
}

let panel = "schedules", timeShown = null, roundShown = 0, rankShown = 0;

function address() {
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(state[panel]))
        if (value !== DEFAULTS[panel][name] && (name !== "list" || state[panel].kind === "list"))
            query.set(name, value);
    if (panel === "schedules" && timeShown !== null) query.set("time", String(timeShown));
    if (panel === "collectives" && roundShown) query.set("round", String(roundShown));
    if (panel === "layout" && rankShown) query.set("rank", String(rankShown));
    const text = query.toString();
    return "#" + panel + (text ? "?" + text : "");
}

function keepAddress() {
    const now = address();
    document.querySelector(`nav a[data-panel=${panel}]`).href = now;  // the way back to this panel as it is
    if (location.hash !== now) history.replaceState(null, "", now);
}

// A number in a field, or an exception with the sentence.
function number(what, text, least, most, whole) {
    const x = Number(text), plain = whole ? /^[0-9]+$/ : /^[0-9]*\.?[0-9]+(e-?[0-9]+)?$/;
    if (!plain.test(text.trim())) throw new Error(`${what}: ${whole ? "a whole number" : "a number"}, not '${text}'`);
    if (x < least || x > most) throw new Error(`${what}: ${text} must lie between ${least} and ${most}`);
    return x;
}

function refuse(sentence) {
    $("refusal").textContent = sentence;
    $("refusal").hidden = !sentence;
}

// Tries the values of the fields. A refusal changes the sentence and nothing else.
let turn = 0;
async function attempt(values) {
    const mine = ++turn, at = panel, begin = performance.now();
    let done;
    try {
        done = await ({schedules: runSchedule, layout: runLayout, collectives: runRing})[at](values);
    } catch (e) {
        if (mine === turn) refuse(e.message), $("numbers").textContent = JSON.stringify({refused: e.message});
        return false;
    }
    if (mine !== turn || at !== panel) return false;
    refuse("");
    state[at] = values;
    done();
    keepAddress();
    $("numbers").dataset.ms = String(performance.now() - begin);
    return true;
}

async function changed(field) {
    const values = {};
    for (const f of fields(panel)) values[f.name] = valueOf(f);
    if (panel === "schedules" && field && field.name === "kind") suitChunks(values);
    if (panel === "layout" && field && field.name === "model") takeModel(values);
    else if (panel === "layout" && field && MODEL_FIELDS.slice(0, MODEL_COUNT).includes(field.name)) values.model = "";
    showFields(panel, values);
    timeShown = null;
    if (panel === "collectives") roundShown = 0;
    const ok = await attempt(values);
    for (const f of fields(panel)) f.classList.toggle("bad", !ok && f === field);
    if (ok) fillFields(panel, values);
}

// Only the interleaved schedule has chunks: choosing another one, or it, changes v as well.
function suitChunks(values) {
    if (values.kind === "interleaved" && values.v === "1") values.v = "2";
    else if (values.kind !== "interleaved" && values.kind !== "list") values.v = "1";
}

function takeModel(values) {
    const sizes = MODELS[values.model];
    if (!sizes) return;
    sizes.forEach((size, i) => { values[MODEL_FIELDS[i]] = String(size); });
    if (sizes.length > MODEL_COUNT) values.schedule = "", values.recompute = "layer", values.sp = values.zero = "0";
}

// Opens what an address says. Names that no field has are passed over.
async function open(hash) {
    const [name, query] = hash.replace(/^#/, "").split("?"), wanted = new URLSearchParams(query || "");
    panel = PANELS.includes(name) ? name : "schedules";
    for (const p of PANELS) section(p).hidden = p !== panel;
    for (const link of document.querySelectorAll("nav a")) {
        if (link.dataset.panel === panel) link.setAttribute("aria-current", "page");
        else link.removeAttribute("aria-current");
    }
    const values = {...DEFAULTS[panel]};
    const take = () => { for (const [key, value] of wanted) if (key in values) values[key] = value; };
    take();
    if (panel === "layout" && wanted.has("model")) takeModel(values), take();  // the address may change a size
    const place = key => Math.max(0, Number(wanted.get(key)) || 0);
    stop();
    timeShown = wanted.has("time") ? place("time") : null;
    roundShown = Math.floor(place("round"));
    rankShown = Math.floor(place("rank"));
    fillFields(panel, values);
    if (await attempt(values)) return true;
    const sentence = $("refusal").textContent, numbers = $("numbers").textContent;
    if (!{schedules: shown, layout: laid, collectives: ringShown}[panel] && await attempt({...DEFAULTS[panel]})) {
        refuse(sentence);  // below it stands what the panel shows at first
        $("numbers").textContent = numbers;
    }
    return false;
}

// ---- drawing --------------------------------------------------------------------------------------------------------

// Returns a canvas of width x height pixels of the screen, and its context in these pixels.
function paper(canvas, width, height) {
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = width + "px";
    canvas.style.height = height + "px";
    const g = canvas.getContext("2d");
    g.scale(ratio, ratio);
    g.fillStyle = "#fff";
    g.fillRect(0, 0, width, height);
    g.textBaseline = "middle";
    return g;
}

const roomFor = least => Math.max(least, Math.min(1248, document.querySelector("main").clientWidth));
const font = (size, bold) => `${bold ? "bold " : ""}${size}px Helvetica, Arial, "DejaVu Sans", sans-serif`;

function label(g, text, x, y, {size = 12, color = COLORS.ink, align = "left", bold = false} = {}) {
    g.font = font(size, bold);
    g.fillStyle = color;
    g.textAlign = align;
    g.fillText(text, x, y);
}

function arrow(g, x1, y1, x2, y2, color) {
    const angle = Math.atan2(y2 - y1, x2 - x1);
    g.strokeStyle = g.fillStyle = color;
    g.lineWidth = 2;
    g.beginPath();
    g.moveTo(x1, y1);
    g.lineTo(x2 - 7 * Math.cos(angle), y2 - 7 * Math.sin(angle));
    g.stroke();
    g.beginPath();
    g.moveTo(x2, y2);
    for (const side of [2.7, -2.7]) g.lineTo(x2 + 10 * Math.cos(angle + side), y2 + 10 * Math.sin(angle + side));
    g.fill();
}

function mix(a, b, t) {
    const part = i => Math.round(parseInt(a.slice(i, i + 2), 16) * (1 - t) + parseInt(b.slice(i, i + 2), 16) * t);
    return `rgb(${part(1)},${part(3)},${part(5)})`;
}

function legend(id, entries) {
    $(id).replaceChildren(...entries.map(([color, text]) => {
        const span = document.createElement("span"), box = document.createElement("i");
        box.style.background = color;
        span.append(box, text);
        return span;
    }));
}

function facts(id, rows) {
    $(id).replaceChildren(...rows.flatMap(([name, text]) => {
        const dt = document.createElement("dt"), dd = document.createElement("dd");
        dt.textContent = name;
        dd.textContent = text;
        return [dt, dd];
    }));
}

const percent = x => (100 * x).toFixed(2) + "%";
const short = x => String(+x.toPrecision(6));
const plural = (n, what) => `${n} ${what}${n === 1 ? "" : what.endsWith("h") ? "es" : "s"}`;
function bytesText(x) {
    for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
        if (x >= size) return (x / size).toFixed(x < 10 * size ? 2 : 1) + " " + unit;
    return Math.round(x) + " B";
}

// ---- schedules ------------------------------------------------------------------------------------------------------

let shown = null;  // the schedule that is drawn

const rowHeight = p => Math.max(6, Math.min(38, Math.floor(620 / p)));
const MOST_LANES = 47;  // stages that have room for their messages: with one more, rows are 12 pixels high

// Runs a schedule in the program; the numbers of the result.
function schedule(c, kind, p, m, v, costs, transfer, layers, limit, buffers, one) {
    const code = c.call("schedule_run", kind, p, m, v, ...costs, transfer, layers, limit, buffers, one,
                        MOST_LANES);
    if (code === 1) throw new Error(c.text(c.c.stderr_text));
    const at = c.c.schedule_result(), x = c.doubles(at, 12), pointers = new Uint32Array(c.c.memory.buffer, at + 96, 5);
    const r = {p: x[0], m: x[1], v: x[2], split: x[3], makespan: x[4], busy: x[5], bubble: x[6], formula: x[7],
               proved: x[8], needs: x[9], limit: x[10], hangs: x[11], sentence: c.text(c.c.stderr_text)};
    r.first = c.ints(pointers[1], r.p + 1);
    r.count = r.first[r.p];
    r.times = c.doubles(pointers[0], 4 * r.count);      // a box has 32 bytes: start, end, kind, micro, chunk, stream
    r.marks = c.ints(pointers[0], 8 * r.count);
    r.flight = c.ints(pointers[2], r.p);
    r.layers = c.ints(pointers[3], r.p * r.v);
    r.stuck = [];
    const stuck = c.ints(pointers[4], 6 * r.p);
    for (let s = 0; s < r.p; s++) {
        const [type, kind, micro, chunk, peer, input] = stuck.subarray(6 * s, 6 * s + 6);
        r.stuck.push({type, kind, micro, chunk, peer, input});
    }
    return r;
}

async function runSchedule(values) {
    const kind = KINDS.indexOf(values.kind), list = values.kind === "list";
    if (kind < 0) throw new Error(`the schedule must be one of ${KINDS.join(", ")}, not '${values.kind}'`);
    const size = (what, name, most) => list ? 1 : number(what, values[name], 1, most, true);
    const p = size("stages", "p", 1024), m = size("micro-batches", "m", 65536), v = size("chunks", "v", 1024);
    const cost = ["F", "B", "W"].map(name => number("the time " + name, values[name], 0, 1e6));
    if (kind === 4 && cost[0] === 0) throw new Error("zb-auto needs a forward F that takes some time");
    if (cost[0] + cost[1] + cost[2] === 0) throw new Error("one of F, B and W must take some time");
    const transfer = number("the transfer", values.transfer, 0, 1e6);
    const layers = values.layers === "" ? 0 : number("layers", values.layers, 1, 1e5, true);
    const limit = values.limit === "" ? 0 : number("in flight, at most", values.limit, 1, 1e6, true);
    const buffers = number("buffers", values.buffers, 1, 65536, true);
    const c = await spareProgram();
    if (list) c.write(c.c.schedule_text, values.list);
    const r = schedule(c, kind, p, m, v, cost, transfer, layers, limit, buffers, values.one === "1" ? 1 : 0);
    r.cost = cost;
    r.program = c;
    r.values = values;
    return () => { shown = r; showSchedule(); };
}

const messageName = (kind, verb) => `${verb} of ${kind === 0 ? "activations" : "gradients"}`;

// Returns the sentence on the operation of a stage that does not begin, and why.
function stuckSentence(r, s) {
    const {type, kind, micro, chunk, peer, input} = r.stuck[s];
    const which = `micro-batch ${micro}${r.v > 1 ? `, chunk ${chunk}` : ""}`;
    if (type === 1) return `Stage ${s} is in the ${messageName(kind, "send")} of ${which} to stage ${peer}, ` +
        "which has not come to its receive.";
    if (type === 2) return `Stage ${s} is in the ${messageName(kind, "receive")} of ${which} from stage ${peer}, ` +
        "which has not come to its send.";
    if (input) return `Stage ${s} waits with the ${STEPS[kind]} of ${which} for what stage ${peer} has not sent.`;
    return `Stage ${s} waits with the ${STEPS[kind]} of ${which} for a buffer, as stage ${peer} has not received.`;
}

// Stages that wait for each other in a circle; empty if none do.
function circle(r) {
    for (let start = 0; start < r.p; start++) {
        const way = [];
        for (let s = start; r.stuck[s].type >= 0 && r.stuck[s].peer !== s; s = r.stuck[s].peer) {
            if (way.includes(s)) return way.slice(way.indexOf(s));
            way.push(s);
        }
    }
    return [];
}

function showSchedule() {
    const r = shown, kinds = [["forward", "forward"], ["backward", r.split ? "backward, input half (B)" : "backward"]];
    if (r.split) kinds.push(["weight", "backward, weight half (W)"]);
    const entries = kinds.map(([name, text]) => [COLORS[name][0], text]);
    if (r.v > 1) entries.push([COLORS.forward[1], "lighter: higher chunks"]);
    if (Number(r.values.transfer) > 0) entries.push([COLORS.send, "send"], [COLORS.receive, "receive"]);
    legend("kinds", entries);
    const ideal = r.busy / r.p, even = r.hangs ? "" : ` (${short(r.makespan - ideal)} of ${short(ideal)})`;
    const formulas = {gpipe: "(p-1)/m", "1f1b": "(p-1)/m", interleaved: "(p-1)/(v m)",
                      "zb-h1": "(p-1)(F+B-W)/(m(F+B+W))"};
    const rows = [["Sizes", `${plural(r.p, "stage")}, ${plural(r.m, "micro-batch")}, ` +
                            `${plural(r.v, "chunk")} a stage`]];
    rows.push(["Bubble", r.hangs ? "none: it hangs" : `${percent(r.bubble)} of compute time${even}`]);
    if (formulas[r.values.kind])
        rows.push(["Formula", `${formulas[r.values.kind]} = ${percent(r.formula)}, for equal chunks and free ` +
                              "messages"]);
    rows.push(["Proof", r.proved ? `cannot hang with ${plural(r.proved, "buffer")} at each end of a link, on streams ` +
                                   "of their own" : r.sentence]);
    rows.push(["Buffers needed", r.needs ? `${r.needs}: with fewer it hangs` : "none suffice"]);
    if (r.needs === 1) rows[rows.length - 1][1] = "1";
    if (r.values.kind === "zb-auto") rows.push(["In flight, at most", `${r.limit} micro-batches a stage`]);
    if (r.layers[0]) rows.push(["Layers of the chunks", [...r.layers].slice(0, 64).join(" ") +
                                                        (r.layers.length > 64 ? " ..." : "")]);
    facts("facts", rows);
    const ring = circle(r), order = ring.concat(r.stuck.map((_, s) => s).filter(s => !ring.includes(s)));
    $("stuck").replaceChildren(...order.filter(s => r.hangs && r.stuck[s].type >= 0).slice(0, 12).map(s => {
        const li = document.createElement("li");
        li.textContent = stuckSentence(r, s) + (ring.includes(s) && ring.length > 1 ? " (in the circle)" : "");
        return li;
    }));
    drawSchedule();
    $("numbers").textContent = JSON.stringify({
        p: r.p, m: r.m, v: r.v, split: r.split, makespan: r.makespan, busy: r.busy, bubble: r.bubble,
        formula: r.formula, proved: r.proved, needs: r.needs, hangs: r.hangs, sentence: r.sentence,
        flight: [...r.flight], layers: [...r.layers], span: ownSpans(r),
        stuck: r.stuck.map((x, s) => x.type < 0 ? "" : stuckSentence(r, s)), circle: ring});
}

// From the first start to the last end of each stage's steps, which are in the order of time; messages come after them.
function ownSpans(r) {
    return Array.from({length: r.p}, (_, s) => {
        const first = r.first[s];
        let last = r.first[s + 1] - 1;
        while (last >= first && r.marks[8 * last + 4] > 2) last--;
        return last >= first ? Math.max(0, r.times[4 * last + 1] - r.times[4 * first]) : 0;
    });
}

const MARGIN = {left: 64, right: 54, top: 6};

function drawSchedule() {
    const r = shown, end = Math.max(r.makespan, 1e-9), now = timeShown === null ? end : Math.min(timeShown, end);
    const lanes = Number(r.values.transfer) > 0 && r.p <= MOST_LANES, row = rowHeight(r.p);
    const gap = row > 12 ? 3 : row > 7 ? 1 : 0, box = row - gap - (lanes ? 6 : 0), width = roomFor(360);
    const g = paper($("timeline"), width, MARGIN.top + r.p * row + 22);
    const scale = (width - MARGIN.left - MARGIN.right) / end, x = t => MARGIN.left + t * scale;
    const shades = STEPS.map(name => Array.from({length: r.v}, (_, c) =>
        mix(...COLORS[name], r.v > 1 ? c / (r.v - 1) * 0.85 : 0)));
    const colors = Float64Array.from(shades.flat().flatMap(shade => shade.match(/[0-9]+/g).map(Number)));
    const every = Math.ceil(13 / row);
    for (let s = 0; s < r.p; s++) {
        const y = MARGIN.top + s * row;
        if (s % every === 0) label(g, (s ? "" : "stage ") + s, MARGIN.left - 8, y + row / 2, {align: "right"});
        g.fillStyle = "#f3f5f8";
        g.fillRect(MARGIN.left, y, end * scale, box);
        if ((r.first[s + 1] - r.first[s]) * 3 > width) drawCrowdedRow(g, r, s, y, box, scale, now, colors);
        else drawRow(g, r, s, y, box, x, now, shades, lanes);
    }
    if (now < end || r.hangs) {
        g.fillStyle = r.hangs && now >= end ? COLORS.orange : COLORS.ink;
        g.fillRect(x(now), MARGIN.top, 1.5, r.p * row);
    }
    if (r.hangs && now >= end) drawCircle(g, r, row, x(now));
    drawAxis(g, end, scale, MARGIN.top + r.p * row);
    $("timeline").setAttribute("aria-label",
                               `timeline of ${r.p} stages and ${r.m} micro-batches up to time ${short(now)}`);
    $("time").value = String(Math.round(now / end * 1000));
    $("clock").textContent = `time ${short(now)} of ${short(end)}`;
    drawFlight(r, now, end);
}

// A row whose boxes can be told apart.
function drawRow(g, r, s, y, height, x, now, shades, lanes) {
    for (let i = r.first[s]; i < r.first[s + 1]; i++) {
        const start = r.times[4 * i], stop = r.times[4 * i + 1], kind = r.marks[8 * i + 4];
        if (start >= now) continue;
        const a = x(start), b = x(Math.min(stop, now));
        if (kind > 2) {
            if (!lanes) continue;
            g.fillStyle = kind === 3 ? COLORS.send : COLORS.receive;
            g.fillRect(a, y + height + (kind === 3 ? 0 : 3), Math.max(b - a, 1), 3);
            continue;
        }
        g.fillStyle = shades[kind][r.marks[8 * i + 6]];
        g.fillRect(a, y, Math.max(b - a - (b - a > 5 ? 1 : 0), 1), height);
        if (b - a < 14 || height < 12) continue;
        const micro = r.marks[8 * i + 5], dark = r.v === 1 || r.marks[8 * i + 6] < r.v / 2;
        const size = Math.min(13, height - 2, (b - a) / (String(micro).length * 0.62));
        if (size >= 8) label(g, String(micro), (a + b - 1) / 2, y + height / 2 + 0.5,
                             {size, color: dark ? "#fff" : COLORS.ink, align: "center"});
    }
}

// A row with more boxes than pixels: each column of pixels has the mean colour of the boxes in it. colors: red, green
// and blue of each kind and chunk.
function drawCrowdedRow(g, r, s, y, height, scale, now, colors) {
    const columns = Math.ceil(now * scale), sums = new Float32Array(4 * columns);
    const {times, marks, v} = r, stop = r.first[s + 1];
    for (let i = r.first[s]; i < stop; i++) {
        const start = times[4 * i], kind = marks[8 * i + 4];
        if (start >= now || kind > 2) break;  // computes are in the order of time, then messages
        const a = start * scale, b = Math.min(times[4 * i + 1], now) * scale;
        const color = 3 * (kind * v + marks[8 * i + 6]);
        for (let column = Math.floor(a); column < b && column < columns; column++) {
            const part = Math.min(b, column + 1) - Math.max(a, column);
            sums[4 * column] += part * colors[color];
            sums[4 * column + 1] += part * colors[color + 1];
            sums[4 * column + 2] += part * colors[color + 2];
            sums[4 * column + 3] += part;
        }
    }
    const image = crowded.createImageData(Math.max(columns, 1), 1), idle = [243, 245, 248];
    for (let column = 0; column < columns; column++) {
        const free = Math.max(0, 1 - sums[4 * column + 3]);
        for (let k = 0; k < 3; k++) image.data[4 * column + k] = sums[4 * column + k] + free * idle[k];
        image.data[4 * column + 3] = 255;
    }
    crowded.canvas.width = Math.max(columns, 1);
    crowded.putImageData(image, 0, 0);
    g.drawImage(crowded.canvas, MARGIN.left, y, Math.max(columns, 1), height);
}
const crowded = document.createElement("canvas").getContext("2d");
crowded.canvas.height = 1;

// Arrows from each stage that waits to the one for which it waits.
function drawCircle(g, r, row, at) {
    const ring = circle(r);
    for (let s = 0; s < r.p; s++) {
        const {type, peer} = r.stuck[s];
        if (type < 0 || peer === s || Math.abs(peer - s) > r.p) continue;
        const y = t => MARGIN.top + t * row + row / 2, side = at + 8 + (peer > s ? 0 : 16);
        arrow(g, side, y(s) + (peer > s ? 3 : -3), side, y(peer) + (peer > s ? -3 : 3),
              ring.includes(s) ? COLORS.orange : "#d9a68f");
    }
}

function drawAxis(g, end, scale, y) {
    const power = 10 ** Math.floor(Math.log10(end / 8)), lead = end / 8 / power;
    const step = power * (lead <= 1 ? 1 : lead <= 2 ? 2 : lead <= 5 ? 5 : 10);
    for (let t = 0; t <= end * 1.0001; t += step) {
        g.fillStyle = COLORS.grid;
        g.fillRect(MARGIN.left + t * scale, y, 1, 5);
        label(g, short(t), MARGIN.left + t * scale, y + 13, {size: 11, color: COLORS.muted, align: "center"});
    }
}

// Micro-batches and chunks whose activations a stage holds: from the start of a forward to the end of the last step
// that reads them.
function drawFlight(r, now, end) {
    const peak = Math.max(1, ...r.flight), row = Math.max(6, Math.min(30, Math.floor(420 / r.p))), width = roomFor(360);
    const g = paper($("flight"), width, MARGIN.top + r.p * row + 4), last = r.split ? 2 : 1;
    const scale = (width - MARGIN.left - MARGIN.right) / end, every = Math.ceil(13 / row);
    for (let s = 0; s < r.p; s++) {
        const base = MARGIN.top + (s + 1) * row - 1, unit = (row - 3) / peak;
        const columns = Math.ceil(now * scale), most = new Int32Array(columns + 1);  // held in each column of pixels
        let held = 0, at = 0;
        const {times, marks} = r, stop = r.first[s + 1];
        for (let i = r.first[s]; i <= stop; i++) {
            const kind = i < stop ? marks[8 * i + 4] : last;
            const change = i === stop ? now : kind === 0 ? times[4 * i] : times[4 * i + 1];
            if ((kind !== 0 && kind !== last) || change > now) continue;
            const to = Math.min(columns, Math.max(at, Math.ceil(change * scale)));
            for (let column = Math.max(0, at - 1); column < to; column++) most[column] = Math.max(most[column], held);
            at = to;
            if (i < stop) held += kind === 0 ? 1 : -1;
        }
        g.fillStyle = COLORS.share;
        for (let column = 0, from = 0; column < columns; column++) {
            if (column + 1 < columns && most[column + 1] === most[from]) continue;
            g.fillRect(MARGIN.left + from, base - most[from] * unit, column + 1 - from, most[from] * unit);
            from = column + 1;
        }
        g.fillStyle = COLORS.grid;
        g.fillRect(MARGIN.left, base, end * scale, 1);
        if (s % every) continue;
        label(g, (s ? "" : "stage ") + s, MARGIN.left - 8, base - row / 2 + 1, {align: "right"});
        label(g, now < end ? `${held} / ${r.flight[s]}` : `max ${r.flight[s]}`, width - MARGIN.right + 5,
              base - row / 2 + 1, {size: Math.min(12, row + 4)});
    }
    $("flight").setAttribute("aria-label", "most activations in flight on each stage: " + [...r.flight].join(", "));
}

// The times at which something begins or ends, in order.
function moments(r) {
    if (r.moments) return r.moments;
    const all = new Float64Array(2 * r.count);
    for (let i = 0; i < r.count; i++) all[2 * i] = r.times[4 * i], all[2 * i + 1] = r.times[4 * i + 1];
    all.sort();
    return r.moments = [...all].filter((t, i) => i === 0 || t > all[i - 1] + 1e-9);
}

function moveTime(direction) {
    const all = moments(shown), end = shown.makespan, now = timeShown === null ? end : timeShown;
    const next = direction > 0 ? all.find(t => t > now + 1e-9) : all.filter(t => t < now - 1e-9).pop();
    timeShown = next === undefined ? (direction > 0 ? null : 0) : next >= end ? null : next;
    drawSchedule();
    keepAddress();
}

// ---- the player -----------------------------------------------------------------------------------------------------

let playing = 0;

function stop() {
    clearInterval(playing);
    playing = 0;
    $("play").textContent = $("ringplay").textContent = "play";
}

function play() {
    if (playing) return stop();
    $("play").textContent = $("ringplay").textContent = "stop";
    if (panel === "collectives") {
        if (roundShown >= ringShown.rounds) roundShown = 0, drawRing();
        playing = setInterval(() => { moveRound(1); if (roundShown >= ringShown.rounds) stop(); }, 900);
    } else {
        const end = shown.makespan, pace = end / Math.min(240, Math.max(60, 2 * moments(shown).length));
        if (timeShown === null) timeShown = 0;
        playing = setInterval(() => {
            timeShown = Math.min(end, timeShown + pace);
            if (timeShown >= end) timeShown = null, stop();
            drawSchedule();
            if (!playing) keepAddress();
        }, 50);
    }
}

// ---- layout ---------------------------------------------------------------------------------------------------------

const SWITCHES = {layers: "layers", heads: "heads", channels: "channels", vocab: "vocab", seq: "seq", tensor: "tensor",
                  data: "data", pipeline: "pipeline", virtual: "virtual", micro: "micro-batch", global: "global-batch",
                  schedule: "schedule", recompute: "recompute", order: "order", sp: "sequence-parallel", zero: "zero"};
const MOST_RANKS = 16384;
let laid = null;

// The trainer's flags for these values. A field that is empty leaves its flag out, as one may.
function flagsOf(values) {
    let flags = "";
    for (const [field, flag] of Object.entries(SWITCHES)) {
        if (values[field].trim() === "" || (field === "recompute" && values[field] === "none")) continue;
        if (values[field] === {order: "tdp", sp: "0", zero: "1", virtual: "1"}[field]) continue;
        flags += ` --${flag} ${values[field].trim()}`;
    }
    return flags;
}

// True if the schedule is train_zero_bubble's.
const splitsBackward = values => values.schedule.trim().startsWith("zb-");

async function runLayout(values) {
    const node = number("GPUs a node", values.node, 1, 1e6, true);
    const memory = number("GiB of a GPU", values.memory, 1, 1e6, true);
    const size = name => /^[0-9]{1,7}$/.test(values[name].trim()) ? Math.max(1, Number(values[name])) : 1;
    const t = size("tensor"), d = size("data"), p = size("pipeline"), ranks = t * d * p;
    if (ranks > MOST_RANKS) throw new Error(`${ranks} ranks are more than this page draws: ${MOST_RANKS} are the most`);
    const flags = flagsOf(values), c = await program();
    c.write(c.c.command_text, (flags + " --dry-run").trim());
    const place = values.precision, split = Number(splitsBackward(values));
    const at = c.call("layout_run_" + place, c.c.command_text.value, t, d, p, node, split);
    const sums = 4 * GROUPS.length * OPS.length, first = 9 + 2 * sums, x = c.doubles(at, first + 6 * (p + 1));
    const r = {t, d, p, ranks, node, memory, values, flags, program: c, micros: x[1], chunks: x[2], parameters: x[3],
               flops: x[4], reserve: x[5], counted: x[6], bubble: x[7], formula: x[8], stages: []};
    r.all = sentOf(x.subarray(9));
    for (let s = 0; s < p; s++) r.stages.push(bytesOf(x.subarray(first + 6 * (s + 1))));
    r.place = rank => c.call("layout_place_" + place, rank);
    r.rank = rank => {
        const x = c.doubles(c.call("layout_rank_" + place, rank), first + 6);
        return {sent: sentOf(x.subarray(9 + sums)), bytes: bytesOf(x.subarray(first))};
    };
    return () => { laid = r; showLayout(); };
}

function bytesOf([layers, slots, weights, gradients, optimizer, activations]) {
    return {layers, slots, weights, gradients, optimizer, activations};
}

function sentOf(x) {
    return GROUPS.map((_, g) => OPS.map((_, o) => {
        const [calls, sent, received, across] = x.subarray(4 * (g * OPS.length + o));
        return {calls, sent, received, across};
    }));
}

const PARTS = [["weights", "#2c5f9e"], ["gradients", "#1f7a5c"], ["optimizer", "#8a5ac2"], ["activations", "#e3a33b"],
               ["libraries", "#c2c9d1"]];
const stageBytes = (r, s) => s.weights + s.gradients + s.optimizer + s.activations + r.reserve;

function showLayout() {
    const r = laid, v = r.values, fullest = Math.max(...r.stages.map(s => stageBytes(r, s))), room = r.memory * 2 ** 30;
    if (!(rankShown >= 0 && rankShown < r.ranks)) rankShown = 0;
    const launch = r.ranks > 1 ? `mpirun -n ${r.ranks} ` : "";
    const name = splitsBackward(v) ? "train_zero_bubble" : "train_gpt_3d";
    const line = `${launch}build/cuda-${v.precision}/${name} --train-data 'data/train_*.bin'${r.flags}`;
    $("command").replaceChildren(...line.split(" --").flatMap((word, i) => {  // a line breaks between flags
        const span = document.createElement("span");
        span.textContent = (i ? "--" : "") + word;
        return i ? [" ", span] : [span];
    }));
    const nodes = Math.ceil(r.ranks / r.node), perRank = r.all.flat().reduce((sum, x) => sum + x.sent, 0) / r.ranks;
    const rows = [["Parameters", `${(r.parameters / 1e9).toFixed(3)} billion`],
                  ["Ranks", `${r.ranks} = ${r.t} tensor x ${r.d} data x ${r.p} pipeline, on ${plural(nodes, "node")}`],
                  ["A step", `${plural(r.micros, "micro-batch")} on each data rank, ` +
                             `${flopsText(r.flops)} in all`],
                  ["Memory", `${bytesText(fullest)} of ${r.memory} GiB on the fullest stage: ` +
                             (fullest <= room ? "fits" : "does not fit")],
                  ["Bubble", `${percent(r.bubble)} of compute time, messages free` +
                             (Number.isNaN(r.formula) ? "" : `; formula of equal chunks ${percent(r.formula)}`)],
                  ["Sent", r.counted ? `${bytesText(perRank)} a rank and step on average`
                                     : "not counted: too many passes of a layer for this page"]];
    facts("sums", rows);
    legend("parts", PARTS.map(([name, color]) =>
        [color, name === "libraries" ? "left to libraries (estimate)" : name]));
    drawGrid();
    drawBytes();
    $("numbers").textContent = JSON.stringify({t: r.t, d: r.d, p: r.p, micros: r.micros, stages: r.stages, all: r.all,
        bubble: r.bubble, parameters: r.parameters, counted: r.counted, flags: r.flags, precision: v.precision});
}

// Returns the places of the ranks' cells: stages one under the other, data ranks side by side, tensor ranks in them.
function gridPlaces(r) {
    const width = roomFor(320) - MARGIN.left - 4, least = r.ranks > 4096 ? 6 : 9;
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
    r.chosen = r.rank(rankShown);
    const mine = placeOf(r, rankShown), nodes = Math.ceil(r.ranks / r.node);
    const groups = {tensor: [], data: [], pipeline: []};
    r.cells = new Map();
    for (let rank = 0; rank < r.ranks; rank++) {
        const {t, d, p} = placeOf(r, rank), [x, y] = at.of(t, d, p), node = Math.floor(rank / r.node);
        const color = `hsl(${node * 137.5 % 360}, ${55 + node % 3 * 10}%, ${82 - node % 2 * 6}%)`;
        g.fillStyle = nodes > 1 ? color : COLORS.share;
        g.fillRect(x, y, at.cell - 1, at.cell - 1);
        r.cells.set(`${t},${d},${p}`, rank);
        if (at.cell >= 8 + 7 * String(r.ranks - 1).length)
            label(g, String(rank), x + at.cell / 2 - 0.5, y + at.cell / 2, {size: 11, align: "center"});
        if (d === mine.d && p === mine.p) groups.tensor.push([x, y]);
        if (t === mine.t && p === mine.p) groups.data.push([x, y]);
        if (t === mine.t && d === mine.d) groups.pipeline.push([x, y]);
    }
    const every = Math.ceil(13 / at.row);
    for (let p = 0; p < r.p; p += every)
        label(g, (p ? "" : "stage ") + p, MARGIN.left - 8, MARGIN.top + p * at.row + at.cell / 2, {align: "right"});
    const colors = {tensor: COLORS.violet, data: "#1f7a5c", pipeline: COLORS.orange};
    for (const [name, cells] of Object.entries(groups)) {
        g.strokeStyle = colors[name];
        g.lineWidth = at.cell > 12 ? 3 : 2;
        const inset = at.cell > 12 ? 1.5 : 0.5;
        const side = at.cell - 1 - 2 * inset;
        for (const [x, y] of cells) g.strokeRect(x + inset, y + inset, side, side);
    }
    const [x, y] = at.of(mine.t, mine.d, mine.p);
    g.strokeStyle = COLORS.ink;
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
    rankShown = r.cells.get(to);
    drawGrid();
    keepAddress();
}

function drawBytes() {
    const r = laid, width = roomFor(360), row = Math.max(9, Math.min(30, Math.floor(520 / r.p)));
    const room = r.memory * 2 ** 30, most = Math.max(room, ...r.stages.map(s => stageBytes(r, s)));
    const right = width < 600 ? 84 : 150, scale = (width - MARGIN.left - right) / most;
    const gap = row > 12 ? 4 : 1, every = Math.ceil(13 / row);
    const g = paper($("bytes"), width, MARGIN.top + 18 + r.p * row + 6);
    r.stages.forEach((s, i) => {
        const y = MARGIN.top + 18 + i * row;
        let x = MARGIN.left;
        for (const [name, color] of PARTS) {
            const bytes = name === "libraries" ? r.reserve : s[name];
            g.fillStyle = color;
            g.fillRect(x, y, bytes * scale, row - gap);
            x += bytes * scale;
        }
        if (i % every) return;
        label(g, (i ? "" : "stage ") + i, MARGIN.left - 8, y + (row - gap) / 2, {align: "right"});
        const total = stageBytes(r, s), layers = right > 100 && row > 12 ? `, ${plural(s.layers, "layer")}` : "";
        label(g, bytesText(total) + layers, Math.max(x, MARGIN.left + room * scale) + 8, y + (row - gap) / 2,
              {color: total > room ? COLORS.orange : COLORS.ink, bold: total > room});
    });
    g.fillStyle = COLORS.orange;
    g.fillRect(MARGIN.left + room * scale, MARGIN.top + 14, 2, r.p * row + 4);
    label(g, `${r.memory} GiB`, MARGIN.left + room * scale + 1, MARGIN.top + 6,
          {color: COLORS.orange, align: room * scale > 40 ? "right" : "left"});
    $("bytes").setAttribute("aria-label", "bytes of each stage: " + r.stages.map(s =>
        bytesText(stageBytes(r, s))).join(", "));
}

const flopsText = x => x >= 1e18 ? short(+(x / 1e18).toPrecision(4)) + " EFLOP"
                                 : short(+(x / 1e15).toPrecision(4)) + " PFLOP";

const GROUP_USES = {
    world: "all ranks: gradient norm and loss", tensor: "tensor ranks", data: "data ranks",
    pipeline: "neighbouring stages", embedding: "first and last stage: the tied embedding",
};

function showSent() {
    const r = laid, table = $("sent"), mine = r.counted ? r.chosen.sent : null;
    const cells = (tag, texts) => {
        const tr = document.createElement("tr");
        tr.append(...texts.map(text => {
            const cell = document.createElement(tag);
            cell.textContent = text;
            return cell;
        }));
        return tr;
    };
    const rows = [cells("th", ["who, what", `calls of rank ${rankShown}`, "it sends", "all ranks send",
                               "between nodes"])];
    GROUPS.forEach((group, g) => OPS.forEach((op, o) => {
        const all = r.all[g][o];
        if (!mine || !all.sent) return;
        rows.push(cells("td", [`${GROUP_USES[group]}, ${op}`, String(mine[g][o].calls), bytesText(mine[g][o].sent),
            bytesText(all.sent), `${bytesText(all.across)} (${Math.round(100 * all.across / all.sent)}%)`]));
    }));
    if (rows.length === 1) rows[0] = cells("td", [r.counted ? "nothing: there is one rank" : "not counted"]);
    table.replaceChildren(...rows);
}

// ---- collectives ----------------------------------------------------------------------------------------------------

let ringShown = null;

async function runRing(values) {
    const op = OPS.indexOf(values.op), n = number("ranks", values.n, 2, 16, true);
    if (op < 0 || op > 2)
        throw new Error(`the collective must be one of ${OPS.slice(0, 3).join(", ")}, not '${values.op}'`);
    const size = number("MiB of the buffer", values.size, 0.001, 1e6), width = 4;
    const count = Math.max(1, Math.round(size * 2 ** 20 / width / n)) * n, c = await program();
    const at = c.call("ring_run", op, n, count, width), [rounds, sent, counted] = c.doubles(at, 3);
    const sets = c.ints(at + 24, 32 * 256), part = c.ints(at + 24 + 4 * 32 * 256, 32 * 16);
    const r = {op: values.op, n, rounds, sent, counted, bytes: count * width,
               set: (k, rank, i) => sets[k * 256 + rank * 16 + i], part: (k, rank) => part[k * 16 + rank]};
    return () => { ringShown = r; showRing(); };
}

function showRing() {
    const r = ringShown, k = r.n, times = r.op === "all-reduce" ? `2 (${k} - 1)/${k}` : `(${k} - 1)/${k}`;
    roundShown = Math.max(0, Math.min(r.rounds, Math.floor(roundShown) || 0));
    $("round").max = String(r.rounds);
    facts("ringfacts", [
        ["A rank sends", `${bytesText(r.sent)} = ${times} of the buffer's ${bytesText(r.bytes)}, in ${r.rounds} ` +
                         `rounds of ${bytesText(r.bytes / k)}`],
        ["NCCL_TRAFFIC counts", `${r.counted} bytes sent, ${r.counted} received`],
        ["All together", bytesText(k * r.sent)],
        ["Rounds", `${r.rounds}: each costs a latency, so many ranks make small buffers slow`]]);
    drawRing();
    const last = [];
    for (let rank = 0; rank < k; rank++) last.push(Array.from({length: k}, (_, i) => r.set(r.rounds, rank, i)));
    $("numbers").textContent = JSON.stringify({op: r.op, n: k, rounds: r.rounds, sent: r.sent, counted: r.counted,
                                               last});
}

const rankColor = (rank, n) => `hsl(${rank * 360 / n}, 62%, 66%)`;

// A row for each rank, a cell for each part of its buffer; a stripe in the cell for each rank whose numbers are in it.
function drawRing() {
    const r = ringShown, n = r.n, k = roundShown, room = roomFor(320), left = 74;
    const cell = Math.max(26, Math.min(92, Math.floor((room - left - 130) / n)));
    const height = Math.max(22, Math.min(42, cell * 0.7)), row = height + (n > 8 ? 12 : 22);
    const g = paper($("ring"), left + n * cell + 130, 34 + n * row + 10);
    const whole = (1 << n) - 1, sending = k < r.rounds;
    for (let i = 0; i < n; i++) label(g, (n > 8 ? "" : "part ") + i, left + (i + 0.5) * cell, 16,
                                      {color: COLORS.muted, align: "center"});
    const done = (rank, i) => r.op === "all-gather" ? r.set(k, rank, i) !== 0 : r.set(k, rank, i) === whole;
    for (let rank = 0; rank < n; rank++) {
        const y = 30 + rank * row;
        label(g, `rank ${rank}`, 4, y + height / 2, {bold: true});
        for (let i = 0; i < n; i++) {
            const x = left + i * cell, set = r.set(k, rank, i), stripe = (cell - 8) / n;
            g.fillStyle = done(rank, i) ? COLORS.tokens : set ? "#fff" : "#f3f5f8";
            g.fillRect(x, y, cell - 4, height);
            for (let q = 0; q < n; q++) {
                if (!(set >> q & 1)) continue;
                g.fillStyle = rankColor(q, n);
                g.fillRect(x + 2 + q * stripe, y + 3, Math.max(1, stripe - 1), height - 6);
                if (stripe >= 11) label(g, String.fromCharCode(97 + q), x + 2 + (q + 0.5) * stripe, y + height / 2,
                                        {align: "center"});
            }
            g.strokeStyle = sending && r.part(k, rank) === i ? COLORS.violet : "#b5bfca";
            g.lineWidth = sending && r.part(k, rank) === i ? 3 : 1;
            g.strokeRect(x, y, cell - 4, height);
        }
        if (sending) drawSend(g, r, rank, k, left, cell, row, height);
    }
    const half = r.op === "all-reduce" ? n - 1 : r.op === "reduce-scatter" ? r.rounds : 0;
    const what = k < half ? "the next rank adds its own" : "the next rank takes it over";
    $("ringnote").textContent = sending
        ? `Round ${k + 1} of ${r.rounds}: every rank sends the outlined part, and ${what}. ` +
          `So far each has sent ${bytesText(k * r.bytes / n)}.`
        : `Done: each rank has sent ${bytesText(r.sent)} in ${r.rounds} rounds. Green parts are complete.`;
    $("round").value = String(k);
    $("roundtext").textContent = `${k} of ${r.rounds} rounds`;
    $("ring").setAttribute("aria-label", $("ringnote").textContent);
}

// The path of a rank's message: down to the same part of the next rank; from the last one up to the first.
function drawSend(g, r, rank, k, left, cell, row, height) {
    const part = r.part(k, rank), x = left + (part + 0.5) * cell - 2, y = 30 + rank * row + height;
    if (rank < r.n - 1) return arrow(g, x, y + 1, x, y + row - height - 1, COLORS.violet);
    const side = left + r.n * cell + 8, top = 30 + height / 2;
    label(g, `${r.n - 1} sends part ${part}`, side + 12, y - height / 2 - 8, {color: COLORS.violet});
    label(g, "to rank 0", side + 12, y - height / 2 + 8, {color: COLORS.violet});
    g.strokeStyle = COLORS.violet;
    g.lineWidth = 2;
    g.beginPath();
    g.moveTo(side - 10, y - height / 2);
    g.lineTo(side, y - height / 2);
    g.lineTo(side, top);
    g.stroke();
    arrow(g, side, top, side - 10, top, COLORS.violet);
}

function moveRound(direction) {
    roundShown = Math.max(0, Math.min(ringShown.rounds, roundShown + direction));
    drawRing();
    keepAddress();
}

// ---- events ---------------------------------------------------------------------------------------------------------

function redraw() {
    if (panel === "schedules" && shown) drawSchedule();
    if (panel === "layout" && laid) drawGrid(), drawBytes();
    if (panel === "collectives" && ringShown) drawRing();
}

function inBox(event) {
    const r = shown, box = $("timeline").getBoundingClientRect(), end = Math.max(r.makespan, 1e-9);
    const row = rowHeight(r.p);
    const s = Math.floor((event.clientY - box.top - MARGIN.top) / row);
    const t = (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right) * end;
    if (s < 0 || s >= r.p) return "";
    for (let i = r.first[s]; i < r.first[s + 1]; i++) {
        const kind = r.marks[8 * i + 4];
        if (kind > 2 || r.times[4 * i] > t || r.times[4 * i + 1] < t) continue;
        return `Stage ${s}, ${STEPS[kind]} of micro-batch ${r.marks[8 * i + 5]}` +
               `${r.v > 1 ? `, chunk ${r.marks[8 * i + 6]}` : ""}: ` +
               `${short(r.times[4 * i])} to ${short(r.times[4 * i + 1])}`;
    }
    return `Stage ${s} idles at ${short(t)}`;
}

for (const name of Object.keys(MODELS)) {
    const option = document.createElement("option");
    option.value = name;
    option.textContent = name.replace("ptd", "PTD-P Table 1:");
    section("layout").querySelector("[name=model]").append(option);
}
section("layout").querySelector("[name=model]").prepend(new Option("sizes of your own", ""));

for (const form of document.querySelectorAll("form")) {
    form.addEventListener("submit", event => event.preventDefault());
    form.addEventListener("input", event => changed(event.target));
    form.addEventListener("keydown", event => {  // up and down change a whole number by one
        const field = event.target, by = {ArrowUp: 1, ArrowDown: -1}[event.key];
        if (!by || field.inputMode !== "numeric" || !/^[0-9]+$/.test(field.value)) return;
        event.preventDefault();
        field.value = String(Math.max(0, Number(field.value) + by));
        changed(field);
    });
}
window.addEventListener("hashchange", () => open(location.hash));
window.addEventListener("resize", redraw);
$("play").onclick = $("ringplay").onclick = play;
$("back").onclick = () => { stop(); moveTime(-1); };
$("forth").onclick = () => { stop(); moveTime(1); };
$("ringback").onclick = () => { stop(); moveRound(-1); };
$("ringforth").onclick = () => { stop(); moveRound(1); };
$("time").oninput = () => {
    const at = Number($("time").value) / 1000 * shown.makespan;
    timeShown = at >= shown.makespan ? null : at;
    stop();
    drawSchedule();
    keepAddress();
};
$("round").oninput = () => { stop(); roundShown = Number($("round").value); moveRound(0); };
$("timeline").onmousemove = event => { $("under").textContent = inBox(event); };
$("timeline").onmouseleave = () => { $("under").textContent = ""; };
$("timeline").onkeydown = event => {
    const act = {ArrowLeft: () => moveTime(-1), ArrowRight: () => moveTime(1), " ": play,
                 Home: () => { timeShown = 0; drawSchedule(); keepAddress(); },
                 End: () => { timeShown = null; drawSchedule(); keepAddress(); }}[event.key];
    if (act) event.preventDefault(), event.key !== " " && stop(), act();
};
$("ring").onkeydown = event => {
    const act = {ArrowLeft: () => moveRound(-1), ArrowRight: () => moveRound(1), " ": play,
                 Home: () => moveRound(-ringShown.rounds), End: () => moveRound(ringShown.rounds)}[event.key];
    if (act) event.preventDefault(), event.key !== " " && stop(), act();
};
$("grid").onclick = event => {
    const box = $("grid").getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    for (const [key, rank] of laid.cells) {
        const [left, top] = laid.at.of(...key.split(",").map(Number));
        if (x < left || x >= left + laid.at.cell || y < top || y >= top + laid.at.cell) continue;
        rankShown = rank;
        drawGrid();
        keepAddress();
        return;
    }
};
$("grid").onkeydown = event => {
    const move = {ArrowLeft: [-1, 0, 0], ArrowRight: [1, 0, 0], ArrowUp: [0, 0, -1], ArrowDown: [0, 0, 1],
                  PageUp: [0, -1, 0], PageDown: [0, 1, 0]}[event.key];
    if (move) event.preventDefault(), moveRank(...move);
};
$("copy").onclick = async () => {
    try {
        await navigator.clipboard.writeText($("command").textContent);
    } catch (e) {  // a page that was opened as a file may not write to the clipboard
        getSelection().selectAllChildren($("command"));
    }
};
$("write").onclick = () => {
    const lines = [];
    for (let s = 0; s < shown.p; s++) {
        shown.program.c.schedule_list(s);
        lines.push(shown.program.text(shown.program.c.schedule_text));
    }
    const values = {...state.schedules, kind: "list", list: lines.join("\n")};
    fillFields("schedules", values);
    attempt(values);
};

open(location.hash);
