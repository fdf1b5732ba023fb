"use strict";
// page.js: fields, the address, the worker and the paper. Every number comes from the C in WASM;
// these scripts draw it.

const $ = id => document.getElementById(id);
const PANELS = ["schedules", "layout", "collectives"];
const KINDS = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-auto", "zb-v", "v-half", "dualpipe-v",
               "list", "v-list"];
const byHand = kind => kind.endsWith("list");
const inV = kind => KINDS.indexOf(kind) > 4 && kind !== "list";  // its chunks lie in a V
const GROUPS = ["world", "tensor", "data", "pipeline", "embedding", "context", "context sums",
                "experts", "expert data"];
const OPS = [
    "all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce", "send", "receive",
];
const STEPS = ["forward", "backward", "weight"];

// Boxes as build/tools/timeline and figures draw them: dark and light of the chunks.
const BOXES = {
    forward: ["#2c5f9e", "#a9cdf2"],
    backward: ["#1f7a5c", "#9fe0c4"],
    weight: ["#7d9a2e", "#d3e3a0"],
    send: "#d9632f",
    receive: "#f0bd9f",
    ink: "#1f2933",
};
const THEMES = [
    {...BOXES, text: "#1f2933", muted: "#56616d", grid: "#e3e8ee", violet: "#6b3fa0",
     orange: "#a83c15", experts: "#7a5c00", alike: "#a3345a",
     share: "#bcd8f5", tokens: "#bfe8d6", paper: "#ffffff", ground: "#f3f5f8",
     hatch: "#b4bec9", data: "#1f7a5c", node: 82, circle: "#d9a68f", border: "#76818d",
     focus: "#1b62b8"},
    {...BOXES, text: "#e4e9ef", muted: "#a3b0bd", grid: "#36424f", violet: "#bd9cf0",
     orange: "#ff9d76", experts: "#e0b84a", alike: "#ff8fb3",
     share: "#2b5580", tokens: "#1f5a45", paper: "#14191f", ground: "#222a33",
     hatch: "#5d6b7a", data: "#63c9a2", node: 34, circle: "#8a5a45", border: "#8693a1",
     focus: "#7db5ff"},
];
const darkTheme = window.matchMedia("(prefers-color-scheme: dark)");
let COLORS = THEMES[Number(darkTheme.matches)];

// First values of the fields. The address names only what differs.
const DEFAULTS = {
    schedules: {
        kind: "1f1b", p: "4", m: "8", v: "1", limit: "", F: "1", B: "1", W: "1", transfer: "0",
        pair: "", layers: "", buffers: "2", one: "0", follow: "",
        list: "F0 F1 B0 W0 B1 W1\nF0 B0 F1 B1 W0 W1",
    },
    layout: {
        model: "ptdp-7.5b", layers: "36", heads: "32", channels: "4096", vocab: "51200",
        seq: "2048", tensor: "4", data: "8", pipeline: "2", virtual: "1", micro: "2",
        global: "128", schedule: "", recompute: "layer", order: "tdp", precision: "bf16",
        limit: "", cluster: "dgx-a100", node: "", memory: "", sp: "1", zero: "1", context: "1",
        expert: "1", capacity: "",
    },
    collectives: {op: "all-reduce", n: "4", size: "64"},
};
const MODEL_FIELDS = ["layers", "heads", "channels", "seq", "vocab"];  // as build.sh lists them
// Layouts that fit: t, d, p, v, micro-batch, global batch. A model with experts also has c, e and
// the capacity that the planner takes. The layouts of ptdp are Table 1 of PTD-P (Narayanan et al.
// 2021).
const LAYOUT_FIELDS = ["tensor", "data", "pipeline", "virtual", "micro", "global", "context",
                       "expert", "capacity"];
const LAYOUTS = {
    "gpt2": [1, 8, 1, 1, 4, 32],
    "gpt2-medium": [1, 8, 1, 1, 4, 32],
    "gpt2-large": [1, 8, 1, 1, 4, 32],
    "gpt2-xl": [1, 8, 1, 1, 4, 32],
    "gpt3-175b": [8, 16, 12, 1, 1, 1536],
    "ptdp-1.7b": [1, 32, 1, 1, 16, 512],
    "ptdp-3.6b": [2, 32, 1, 1, 16, 512],
    "ptdp-7.5b": [4, 32, 1, 1, 16, 512],
    "ptdp-18b": [8, 32, 1, 1, 8, 1024],
    "ptdp-39b": [8, 32, 2, 1, 4, 1536],
    "ptdp-76b": [8, 32, 4, 3, 2, 1792],
    "ptdp-145b": [8, 24, 8, 2, 2, 2304],
    "ptdp-310b": [8, 15, 16, 2, 1, 2160],
    "ptdp-530b": [8, 9, 35, 3, 1, 2520],
    "ptdp-1t": [8, 6, 64, 1, 1, 3072],
    "smollm2-135m": [1, 8, 1, 1, 1, 64],
    "qwen2.5-0.5b": [1, 8, 1, 1, 1, 64],
    "qwen3-0.6b": [1, 8, 1, 1, 1, 64],
    "qwen3-1.7b": [1, 8, 1, 1, 1, 64],
    "qwen3-8b": [4, 8, 1, 1, 1, 64],
    "qwen3-32b": [8, 8, 2, 1, 1, 64],
    "mistral-7b": [4, 8, 1, 1, 1, 64],
    "mistral-7b-v0.3": [4, 8, 1, 1, 1, 64],
    "llama-3.2-1b": [1, 8, 1, 1, 1, 64],
    "llama-3.1-8b": [4, 8, 1, 1, 1, 64],
    "llama-3.1-70b": [8, 8, 4, 1, 1, 128],
    "llama-3.1-405b": [8, 8, 18, 1, 1, 256],
    "nemotron-4-15b": [8, 8, 1, 1, 1, 128],
    "nemotron-4-340b": [8, 8, 12, 1, 1, 256],
    "mixtral-8x7b": [2, 8, 2, 1, 1, 64, 2, 4, 1.25],
    "mixtral-8x22b": [2, 16, 4, 1, 1, 128, 4, 8, 1.25],
    "qwen3-30b-a3b": [1, 16, 2, 1, 1, 64, 2, 8, 1.25],
    "qwen3-235b-a22b": [1, 16, 16, 1, 1, 256, 8, 8, 1.25],
};
for (const [name, row] of Object.entries(CLUSTERS)) {  // a row has holes for absent constants
    const pairs = CONSTANTS.map((constant, i) => [constant, row[i]]);
    CLUSTERS[name] = Object.fromEntries(pairs.filter(([, x]) => x !== undefined));
}
LAYOUTS.d12 = LAYOUTS["gpt2"];
LAYOUTS.d24 = LAYOUTS["gpt2-medium"];
LAYOUTS.d36 = LAYOUTS["gpt2-large"];
LAYOUTS.d48 = LAYOUTS["gpt2-xl"];

// ---- the worker ---------------------------------------------------------------------------------

// Returns the bytes of WASM, which is gzip in base64.
async function inflated() {
    const packed = new Blob([Uint8Array.from(atob(WASM), c => c.charCodeAt(0))]);
    return new Response(packed.stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}
const compiled = inflated().then(bytes => WebAssembly.compile(bytes));
const workerText = new Blob([$("worker").textContent], {type: "text/javascript"});
const workerSource = URL.createObjectURL(workerText);

// Returns a function that asks a worker and promises its answer. A new question ends the work on
// the one before it and refuses its promise. The member `end` does this, too. progress(line), if
// given, hears of unfinished work.
function lane() {
    let worker = null, pending = null, count = 0;
    const end = () => {
        if (!pending) return;
        worker.terminate();
        worker = null;
        pending.reject(new Error("superseded"));
        pending = null;
    };
    const question = async (job, values, progress) => {
        const module = await compiled, id = ++count;
        end();
        if (!worker) {
            worker = new Worker(workerSource);
            worker.onmessage = ({data}) => {
                if (!pending || data.id !== pending.id) return;
                if (data.progress !== undefined) return progress && progress(data.progress);
                const {resolve, reject} = pending;
                pending = null;
                if (data.refused === undefined) resolve(data.result);
                else reject(new Error(data.refused));
            };
        }
        return new Promise((resolve, reject) => {
            pending = {id, resolve, reject};
            worker.postMessage({id, job, module, values});
        });
    };
    return Object.assign(question, {end});
}
const ask = lane(), askAside = lane(), askWhatIf = lane(), askTime = lane(), askSearch = lane(),
      askProof = lane();

// ---- fields and the address ---------------------------------------------------------------------

const state = structuredClone(DEFAULTS);  // what is drawn; fields may hold what was refused
const section = panel => $("panel-" + panel);
const fields = panel => [...section(panel).querySelectorAll("form [name]")];
// Returns the value of a field, without blanks around it.
function valueOf(field) {
    if (field.type === "checkbox") return field.checked ? "1" : "0";
    return field.type === "textarea" ? field.value : field.value.trim();
}

function mark(field, bad) {
    field.classList.toggle("bad", bad);
    field.setAttribute("aria-invalid", String(bad));
}

function fillFields(panel, values) {
    for (const field of fields(panel)) {
        if (field.type === "checkbox") field.checked = values[field.name] === "1";
        else if (valueOf(field) !== values[field.name]) field.value = values[field.name];
        mark(field, false);
        // A field that a narrow screen leaves out is shown once it is not as usual.
        if (field.closest(".less") && values[field.name] !== usualOf(panel, values)[field.name])
            field.form.classList.add("all");
    }
    showFields(panel, values);
}

function showFields(panel, values) {
    if (panel === "layout") {
        $("limit").classList.toggle("hidden", values.schedule !== "zb-auto");
        const dense = !Object.hasOwn(MIXTURES, values.model);
        $("capacity").classList.toggle("hidden", dense && !values.capacity);
    }
    if (panel !== "schedules") return;
    const list = byHand(values.kind), form = section(panel).querySelector("form");
    section(panel).querySelector(".list").classList.toggle("hidden", !list);
    for (const label of form.querySelectorAll(".sized")) {
        const two = inV(values.kind) && label.querySelector("[name=v]");  // a V has two chunks
        label.classList.toggle("away", list || Boolean(two));
    }
    for (const label of form.querySelectorAll(".auto"))
        label.classList.toggle("hidden", values.kind !== "zb-auto");
    if (!list) listed = values.kind;
    const name = form.querySelector(`option[value="${listed}"]`);
    $("write").textContent = list ? `back to ${name ? name.text : listed}`
                                  : "write this schedule as a list";
}
let listed = "1f1b";  // the schedule from which a list was made

let panel = "schedules", timeShown = null, roundShown = 0, rankShown = 0;

// Returns the values that an address may leave out. A model's name gives its layout.
function usualOf(at, values) {
    const usual = {...DEFAULTS[at]};
    if (at === "layout" && values.model !== usual.model)
        takeModel(Object.assign(usual, {model: values.model}));
    return usual;
}

function differing(at, values) {
    const usual = usualOf(at, values);
    const named = at === "layout" && values.model !== DEFAULTS.layout.model;
    const differs = ([name, value]) => {
        if (name === "model") return named;
        return value !== usual[name] && (name !== "list" || byHand(values.kind));
    };
    return new URLSearchParams(Object.entries(values).filter(differs));
}

function address() {
    if (tourStep !== null && !tourLeft) return tourAddress();
    const query = differing(panel, state[panel]);
    if (panel === "schedules" && timeShown !== null) query.set("time", String(timeShown));
    if (panel === "schedules" && pinned)
        query.set("pin", differing("schedules", pinned.values).toString() || "1");
    if (panel === "collectives" && roundShown) query.set("round", String(roundShown));
    if (panel === "layout" && rankShown) query.set("rank", String(rankShown));
    if (panel === "layout" && stageShown !== null) query.set("stage", String(stageShown));
    const text = query.toString();
    return "#" + panel + (text ? "?" + text : "");
}

// Puts into the address what is shown. step: as an entry of its own in the history, which undo
// leaves. An entry's state is the number of such steps before it.
function keepAddress(step) {
    const now = address(), at = tourStep === null || tourLeft ? panel : "tour";
    document.querySelector(`nav a[data-panel=${at}]`).href = now;  // the way back as it is
    if (location.hash !== now && step) history.pushState((history.state || 0) + 1, "", now);
    else if (location.hash !== now) history.replaceState(history.state, "", now);
    $("undo").disabled = !history.state;
}

// A sentence about the value of a field.
class Refusal extends Error {
    constructor(field, sentence) {
        super(sentence);
        this.field = field;
    }
}

// Returns the number in a field, which is called `what`, or throws a Refusal.
function number(values, field, what, least, most, whole) {
    const text = values[field], x = Number(text);
    const plain = whole ? /^[0-9]+$/ : /^[0-9]*\.?[0-9]+(e-?[0-9]+)?$/;
    if (!plain.test(text.trim()))
        throw new Refusal(field, `${what}: a ${whole ? "whole " : ""}number, not '${text}'`);
    if (x < least || x > most)
        throw new Refusal(field, `${what}: ${text} must lie between ${least} and ${most}`);
    return x;
}

// Edits that turn one word into another.
function distance(a, b) {
    let row = Array.from({length: b.length + 1}, (_, i) => i);
    for (let i = 1; i <= a.length; i++) {
        const next = [i];
        for (let j = 1; j <= b.length; j++) {
            const changed = row[j - 1] + Number(a[i - 1] !== b[j - 1]);
            next.push(Math.min(row[j] + 1, next[j - 1] + 1, changed));
        }
        row = next;
    }
    return row[b.length];
}

// Refuses a word that is not in the list, with the nearest one if one is near.
function choose(values, field, what, list) {
    const word = values[field], far = a => distance(word.toLowerCase(), a);
    if (list.includes(word)) return;
    const near = [...list].sort((a, b) => far(a) - far(b))[0];
    throw new Refusal(field, `there is no ${what} '${word}'` + (far(near) < word.length
        ? `; did you mean ${near}` : "") + `? There are ${list.join(", ")}`);
}

// A trainer's sentence names flags; this panel has fields.
const FLAG_FIELDS = {
    virtual: "chunks a stage v",
    pipeline: "stages p",
    "global-batch": "micro-batches m",
    "max-in-flight": "in flight, at most",
    schedule: "schedule",
};
function inFields(sentence) {
    if (panel !== "schedules") return sentence;
    const named = Object.keys(FLAG_FIELDS).filter(flag => sentence.includes("--" + flag));
    const fields = named.map(flag => ` (--${flag} is the field "${FLAG_FIELDS[flag]}")`);
    return sentence + fields.join("");
}

// Returns the name of the field that a trainer's sentence is about, or undefined.
function fieldOfFlag(sentence) {
    const flags = panel === "layout" ? SWITCHES : {v: "virtual", p: "pipeline", m: "global-batch",
                                                   limit: "max-in-flight", kind: "schedule"};
    return Object.keys(flags).find(field => sentence.includes("--" + flags[field]));
}

// Shows a sentence, or none. A sentence dims the picture, which then differs from the fields.
function refuse(sentence) {
    $("refusal").textContent = inFields(sentence);
    $("refusal").classList.toggle("none", !sentence);
    document.querySelector("main").classList.toggle("stale", Boolean(sentence));
}

// Tries the values of the fields. A refusal changes the sentence and nothing else.
let turn = 0;
async function attempt(values, step) {
    const mine = ++turn, at = panel, begin = performance.now();
    const slow = setTimeout(() => { $("working").hidden = false; }, 150);
    let done;
    try {
        const run = {schedules: runSchedule, layout: runLayout, collectives: runRing}[at];
        done = await run(values);
    } catch (e) {
        if (mine !== turn) return false;
        refuse(e.message);
        wrongField = e.field || fieldOfFlag(e.message);
        $("numbers").textContent = JSON.stringify({refused: e.message});
        return false;
    } finally {
        clearTimeout(slow);
        if (mine === turn) $("working").hidden = true;
    }
    if (mine !== turn || at !== panel) return false;
    refuse("");
    state[at] = values;
    if (at === "layout" && values.model) lastModel = values.model;
    keepAddress(step);
    done();
    keepAddress();  // a stage or rank that is no more is gone from it
    $("numbers").dataset.ms = String(performance.now() - begin);
    return true;
}

async function changed(field) {
    const values = {};
    for (const f of fields(panel)) values[f.name] = valueOf(f);
    if (panel === "schedules" && field && field.name === "kind") suitChunks(values);
    if (panel === "layout" && field && field.name === "model") {
        takeModel(values);
    } else if (panel === "layout" && field && MODEL_FIELDS.includes(field.name)) {
        // A Llama is more than sizes, so it keeps its name.
        if (!LLAMAS[values.model]) values.model = sameSizes(values, lastModel) ? lastModel : "";
    }
    if (panel === "layout" && values.schedule !== "zb-auto") values.limit = "";
    showFields(panel, values);
    timeShown = null;
    leaveTour();
    if (panel === "collectives") roundShown = 0;
    const ok = await attempt(values, field !== lastChanged);  // letters of one field are one step
    if (ok) lastChanged = field;
    const named = !ok && fields(panel).find(f => f.name === wrongField), wrong = named || field;
    for (const f of fields(panel)) mark(f, !ok && f === wrong);
    if (ok) fillFields(panel, values);
}
let lastChanged = null, wrongField = null, lastModel = DEFAULTS.layout.model;

// Shows these values, which no field was given: a step that undo takes back.
function take(at, values) {
    leaveTour();
    lastChanged = null;
    fillFields(at, values);
    return attempt(values, true);
}

function sameSizes(values, model) {
    return MODEL_FIELDS.every((field, i) => values[field] === String(MODELS[model][i]));
}

// Sets the chunks and the limit for another schedule. Only the interleaved schedule has a number of
// chunks to choose, and only zb-auto a limit.
function suitChunks(values) {
    if (values.kind === "interleaved" && values.v === "1") values.v = "2";
    else if (values.kind !== "interleaved" && !byHand(values.kind)) values.v = "1";
    if (values.kind !== "zb-auto") values.limit = "";
}

function takeModel(values) {
    if (!Object.hasOwn(MODELS, values.model)) return;
    const sizes = MODELS[values.model];
    MODEL_FIELDS.forEach((field, i) => { values[field] = String(sizes[i]); });
    LAYOUT_FIELDS.forEach((field, i) => {
        values[field] = String(LAYOUTS[values.model][i] ?? DEFAULTS.layout[field]);
    });
    Object.assign(values, {schedule: "", limit: "", recompute: "layer", sp: "0", zero: "0"});
    if (values.model === "gpt3-175b") Object.assign(values, {sp: "1", zero: "1"});
    const sp = values.tensor === "1" ? "0" : "1";
    if (LLAMAS[values.model]) Object.assign(values, {sp, zero: "1"});
}

// Opens what an address says. Names that no field has are passed over.
async function open(hash) {
    const [name, query] = hash.replace(/^#/, "").split("?");
    const wanted = new URLSearchParams(query || "");
    if (name === "tour")
        return openTour(Math.floor(Number(wanted.get("step"))) || 1, wanted.get("guess"));
    closeTour();
    return show(name, wanted);
}

let shows = 0;
async function show(name, wanted) {
    const mine = ++shows;
    lastChanged = null;
    panel = PANELS.includes(name) ? name : "schedules";
    for (const p of PANELS) section(p).hidden = p !== panel;
    const now = tourStep === null ? panel : "tour";
    for (const link of document.querySelectorAll("nav a")) {
        if (link.dataset.panel === now) link.setAttribute("aria-current", "page");
        else link.removeAttribute("aria-current");
    }
    for (const text of $("what").querySelectorAll("[data-for]"))
        text.classList.toggle("now", text.dataset.for === now);
    const values = {...DEFAULTS[panel]};
    const take = () => {
        for (const [key, value] of wanted) if (Object.hasOwn(values, key)) values[key] = value;
    };
    take();
    if (panel === "layout" && wanted.has("model")) {
        takeModel(values);
        take();  // the address may change a size
    } else if (panel === "layout" && MODEL_FIELDS.some(field => wanted.has(field))) {
        values.model = "";
    }
    const place = key => Math.max(0, Number(wanted.get(key)) || 0);
    stop();
    timeShown = wanted.has("time") ? place("time") : null;
    roundShown = Math.floor(place("round"));
    rankShown = Math.floor(place("rank"));
    stageShown = wanted.has("stage") ? Math.floor(place("stage")) : null;
    fillFields(panel, values);
    if (panel === "schedules") await openPin(wanted.get("pin"));
    if (mine !== shows) return false;
    if (await attempt(values)) return true;
    // Something else may have been asked meanwhile.
    if (mine !== shows || !$("refusal").textContent) return false;
    const sentence = $("refusal").textContent, numbers = $("numbers").textContent;
    const drawn = {schedules: shown, layout: laid, collectives: ringShown}[panel];
    if (!drawn && await attempt({...DEFAULTS[panel]})) {
        refuse(sentence);  // below it stands what the panel shows at first
        $("numbers").textContent = numbers;
    }
    return false;
}

// ---- drawing ------------------------------------------------------------------------------------

// Returns a canvas of width x height pixels of the screen, and its context in these pixels.
function paper(canvas, width, height) {
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = width + "px";
    canvas.style.height = height + "px";
    const g = canvas.getContext("2d");
    g.scale(ratio, ratio);
    g.fillStyle = COLORS.paper;
    g.fillRect(0, 0, width, height);
    g.textBaseline = "middle";
    return g;
}

const narrow = () => document.documentElement.clientWidth < 620;
function roomFor(least) {
    return Math.max(least, Math.min(1248, document.querySelector("main").clientWidth));
}
function font(size, bold) {
    return `${bold ? "bold " : ""}${size}px Helvetica, Arial, "DejaVu Sans", sans-serif`;
}

function label(g, text, x, y, {size = 12, color = COLORS.text, align = "left", bold = false} = {}) {
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
    for (const side of [2.7, -2.7])
        g.lineTo(x2 + 10 * Math.cos(angle + side), y2 + 10 * Math.sin(angle + side));
    g.fill();
}

function mix(a, b, t) {
    const of = (color, i) => parseInt(color.slice(i, i + 2), 16);
    const part = i => Math.round(of(a, i) * (1 - t) + of(b, i) * t);
    return `rgb(${part(1)},${part(3)},${part(5)})`;
}

// Makes diagonal lines for idle time.
function hatching(g) {
    const tile = document.createElement("canvas"), t = tile.getContext("2d");
    tile.width = tile.height = 6;
    t.fillStyle = COLORS.ground;
    t.fillRect(0, 0, 6, 6);
    t.strokeStyle = COLORS.hatch;
    for (const x of [-6, 0, 6]) {
        t.moveTo(x - 1, 7);
        t.lineTo(x + 7, -1);
    }
    t.stroke();
    return g.createPattern(tile, "repeat");
}

// Entries are [color, text] or [color, text, name of a style that marks it without colour].
function legend(id, entries) {
    $(id).replaceChildren(...entries.map(([color, text, style]) => {
        const span = document.createElement("span"), box = document.createElement("i");
        if (color) box.style.background = color;
        if (style) box.className = style;
        span.append(box, text);
        return span;
    }));
}

function facts(id, rows) {
    $(id).replaceChildren(...rows.flatMap(([name, text]) => {
        const dt = document.createElement("dt"), dd = document.createElement("dd");
        dt.textContent = name;
        dd.append(...(Array.isArray(text) ? text : [text]));
        return [dt, dd];
    }));
}

const percent = x => (100 * x).toFixed(2) + "%";
const short = x => String(+x.toPrecision(6));
const plural = (n, what) => `${n} ${what}${n === 1 ? "" : what.endsWith("h") ? "es" : "s"}`;

// Writes three or four digits and the largest unit that leaves a whole part.
function unitText(x, units, base) {
    const [name, size] = units.find(([, power]) => x >= base ** power) || units[units.length - 1];
    const value = x / base ** size;
    return (size === 0 ? String(Math.round(value)) : value.toFixed(value < 10 ? 2 : 1)) + name;
}
const BYTE_UNITS = [[" PiB", 5], [" TiB", 4], [" GiB", 3], [" MiB", 2], [" KiB", 1], [" B", 0]];
const COUNT_UNITS = [[" trillion", 4], [" billion", 3], [" million", 2], [" thousand", 1], ["", 0]];
const FLOP_UNITS = [[" ZFLOP", 7], [" EFLOP", 6], [" PFLOP", 5], [" TFLOP", 4], [" GFLOP", 3],
                    [" MFLOP", 2], [" KFLOP", 1], [" FLOP", 0]];
const bytesText = x => unitText(x, BYTE_UNITS, 1024);
const countText = x => unitText(x, COUNT_UNITS, 1000);
const flopsText = x => unitText(x, FLOP_UNITS, 1000);

