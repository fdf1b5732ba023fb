// ---- schedules ----------------------------------------------------------------------------------

let shown = null;   // the schedule that is drawn
let pinned = null;  // another one, drawn above it on the same axis

// Returns the pinned schedule with the times at which it is drawn. If it has another number of
// chunks a stage, its times are scaled: a micro-batch is the same work on a stage in both
// schedules. So one box of 1F1B is as long as two of two chunks.
let drawnBeside = {of: null};
function beside() {
    const work = r => r.busy / (r.p * r.m);
    const unlike = pinned && shown && pinned.v !== shown.v && !pinned.hangs && !shown.hangs;
    const times = unlike ? work(shown) / work(pinned) : 1;
    if (!pinned || times === 1) return pinned;
    if (drawnBeside.of !== pinned || drawnBeside.longer !== times)
        drawnBeside = {
            ...pinned, of: pinned, longer: times, times: pinned.times.map(t => times * t),
            makespan: times * pinned.makespan, busy: times * pinned.busy,
        };
    return drawnBeside;
}

// Two pictures of a question have to stand on one screen.
const rowHeight = p => Math.max(6, Math.min(pinned && tourStep !== null ? 28 : 38,
                                            Math.floor((pinned ? 380 : 620) / p)));
// Stages that have room for their messages: with one more, rows are 12 pixels high.
const MOST_LANES = 47;

// Returns the question to the C for these values, or throws an exception with the sentence.
function question(values) {
    choose(values, "kind", "schedule", KINDS);
    const kind = KINDS.indexOf(values.kind), list = byHand(values.kind);
    const size = (what, name, most) => list ? 1 : number(values, name, what, 1, most, true);
    const q = {
        kind,
        p: size("stages", "p", 1024),
        m: size("micro-batches", "m", 65536),
        v: inV(values.kind) && values.v === "1" ? 2 : size("chunks", "v", 1024),
        cost: ["F", "B", "W"].map(name => number(values, name, "the time " + name, 0, 1e6)),
    };
    if (kind === 4 && q.cost[0] === 0)
        throw new Refusal("F", "zb-auto needs a forward F that takes some time");
    if (q.cost[0] + q.cost[1] + q.cost[2] === 0)
        throw new Refusal("F", "one of F, B and W must take some time");
    q.transfer = number(values, "transfer", "the transfer", 0, 1e6);
    q.pair = values.pair === "" ? 0 : number(values, "pair", "F&B overlapped", 1e-6, 1e6);
    q.layers = values.layers === "" ? 0 : number(values, "layers", "layers", 1, 1e5, true);
    q.limit = values.limit === "" || kind !== 4
        ? 0 : number(values, "limit", "in flight, at most", 1, 1e6, true);
    q.buffers = number(values, "buffers", "buffers", 1, 65536, true);
    q.one = values.one === "1" ? 1 : 0;
    q.lanes = MOST_LANES;
    if (list) q.list = values.list;
    return q;
}

// Makes the worker's answer a schedule to draw. A box has 32 bytes: start, end, kind, micro, chunk.
function scheduleOf(r, values) {
    r.count = r.first[r.p];
    r.times = new Float64Array(r.boxes);
    r.marks = new Int32Array(r.boxes);
    r.values = values;
    return r;
}

async function runSchedule(values) {
    const q = question(values), what = "the micro-batch to follow";
    const follow = values.follow === "" ? null : number(values, "follow", what, 0, 65535, true);
    const r = scheduleOf(await ask("schedule", q), values);
    if (follow !== null && follow >= r.m)
        throw new Refusal("follow", `${what}: ${follow} is not there; the last is ${r.m - 1}`);
    return () => {
        shown = r;
        if (hand && (hand.s >= r.p || hand.i >= stepCount(r, hand.s))) hand = null;
        showSchedule();
    };
}

// Pins the schedule of an address (differing values), or none.
async function openPin(text) {
    const values = {...DEFAULTS.schedules};
    if (text === null) pinned = null;
    else {
        for (const [key, value] of new URLSearchParams(text))
            if (Object.hasOwn(values, key)) values[key] = value;
        try {
            pinned = scheduleOf(await ask("schedule", question(values)), values);
        } catch (e) {
            pinned = null;
        }
    }
    showPin();
}

function showPin() {
    $("pin").textContent = pinned ? "unpin" : "pin, to compare";
    $("pin").setAttribute("aria-pressed", String(Boolean(pinned)));
    $("pinnedbox").hidden = !pinned;
    if (!pinned) return;
    const {longer} = beside();
    const why = ": a box of a stage is as long as its chunks below";
    $("pinnedname").textContent =
        "Pinned: " + nameOf(pinned) + (longer ? `, times ${short(longer)}${why}` : "");
}

function nameOf(r) {
    const option = section("schedules").querySelector(`option[value="${r.values.kind}"]`);
    return `${option.text}, p = ${r.p}, m = ${r.m}` + (r.v > 1 ? `, v = ${r.v}` : "");
}

const messageName = (kind, verb) => `${verb} of ${kind === 0 ? "activations" : "gradients"}`;

// Returns the sentence on the operation of a stage that does not begin, and why.
function stuckSentence(r, s) {
    const {type, kind, micro, chunk, peer, input} = r.stuck[s];
    const which = `micro-batch ${micro}${r.v > 1 ? `, chunk ${chunk}` : ""}`;
    const message = messageName(kind, type === 1 ? "send" : "receive");
    if (type === 1)
        return `Stage ${s} is in the ${message} of ${which} to stage ${peer}, ` +
            "which has not come to its receive.";
    if (type === 2)
        return `Stage ${s} is in the ${message} of ${which} from stage ${peer}, ` +
            "which has not come to its send.";
    const step = `Stage ${s} waits with the ${STEPS[kind]} of ${which}`;
    if (input) return `${step} for what stage ${peer} has not sent.`;
    return `${step} for a buffer, as stage ${peer} has not received.`;
}

// Returns the stages that wait for each other in a circle; empty if none do.
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
    const r = shown, half = r.split ? "input half" : "both halves";
    const kinds = [["forward", "F forward"], ["backward", "B backward, " + half]];
    if (r.split || (pinned && pinned.split)) kinds.push(["weight", "W backward, weight half"]);
    const entries = kinds.map(([name, text]) => [COLORS[name][0], text, "mark-" + name]);
    if (r.v > 1) entries.push([COLORS.forward[1], "lighter: higher chunks"]);
    if (Number(r.values.transfer) > 0)
        entries.push([COLORS.send, "send"], [COLORS.receive, "receive"]);
    entries.push([null, r.hangs ? "idle" : "idle: fill, stall, drain, wait for the norm",
                  "mark-idle"]);
    if (r.hangs) entries.push([COLORS.orange, "arrows: waits for that stage, for ever"]);
    legend("kinds", entries);
    const rows = [["Sizes", `${plural(r.p, "stage")}, ${plural(r.m, "micro-batch")}, ` +
                            `${plural(r.v, "chunk")} a stage`]];
    rows.push(["Bubble", bubbleText(r)]);
    const formulas = {gpipe: "(p-1)/m", "1f1b": "(p-1)/m", interleaved: "(p-1)/(v m)",
                      "zb-h1": "(p-1)(F+B-W)/(m(F+B+W))"};
    if (formulas[r.values.kind])
        rows.push(["Formula", `${formulas[r.values.kind]} = ${percent(r.formula)}, for equal ` +
                              "chunks and free messages"]);
    if (!r.hangs) rows.push(["Idle by cause", idleText(r)]);
    if (pinned && !pinned.hangs && !r.hangs)
        rows.push(["Beside the pinned one", comparison(r, beside())]);
    const proof = `cannot hang with ${plural(r.proved, "buffer")} at each end of a link, ` +
        "on streams of their own";
    rows.push(["Proof", r.proved ? proof : r.sentence]);
    rows.push(["Buffers needed", r.needs ? `${r.needs}: with fewer it hangs` : "none suffice"]);
    if (r.needs === 1) rows[rows.length - 1][1] = "1";
    if (r.values.kind === "zb-auto")
        rows.push(["In flight, at most", `${r.limit} micro-batches a stage`]);
    if (r.layers[0]) rows.push(["Layers of the chunks", [...r.layers].slice(0, 64).join(" ") +
                                                        (r.layers.length > 64 ? " ..." : "")]);
    if (r.values.follow !== "") rows.push(...wayOf(r, Number(r.values.follow)));
    facts("facts", rows);
    const ring = circle(r);
    const order = ring.concat(r.stuck.map((_, s) => s).filter(s => !ring.includes(s)));
    const stuck = order.filter(s => r.hangs && r.stuck[s].type >= 0);
    const waits = stuck.slice(0, 12).map(s => stuckSentence(r, s));
    if (r.hangs && ring.length > 1)
        waits.unshift(`Stages ${ring.join(" and ")} wait for each other in a circle, so that ` +
                      "none of them goes on.");
    $("stuck").replaceChildren(...waits.map(sentence => {
        const li = document.createElement("li");
        li.textContent = sentence;
        return li;
    }));
    showPin();
    drawSchedule();
    compareSchedules(r);
    $("numbers").textContent = JSON.stringify({
        p: r.p, m: r.m, v: r.v, split: r.split, makespan: r.makespan, busy: r.busy,
        bubble: r.bubble, formula: r.formula, proved: r.proved, needs: r.needs, hangs: r.hangs,
        sentence: r.sentence, flight: [...r.flight], layers: [...r.layers], span: ownSpans(r),
        idle: r.hangs ? null : idleOf(r),
        stuck: r.stuck.map((x, s) => x.type < 0 ? "" : stuckSentence(r, s)), circle: ring});
}

function bubbleText(r) {
    if (r.hangs) return "unknown: the schedule hangs";
    const ideal = r.busy / r.p, idle = short(r.makespan - ideal);
    const text = `${percent(r.bubble)} of compute time (${idle} of ${short(ideal)})`;
    const spans = ownSpans(r), gaps = spans.reduce((sum, span) => sum + span, 0) - r.busy;
    if (!r.split) return text;
    const own = percent(Math.max(0, gaps) / r.busy);
    return `${text}; between a stage's own first and last step only ${own}. The rest is the wait ` +
           "for the first micro-batch and for the other stages' gradient norm";
}

// Calls seen(start, end, cause) for each idle time of a stage. The causes:
//   0 fill   Before its first step.
//   1 stall  Between steps up to its last forward.
//   2 drain  Between steps after that.
//   3 wait for the norm  After its last step, until all stages are through.
const CAUSES = ["fill", "stall", "drain", "wait for the norm"];
function eachIdle(r, s, seen) {
    let stop = r.first[s + 1], last = -1, at = 0;
    while (stop > r.first[s] && r.marks[8 * (stop - 1) + 4] > 2) stop--;
    for (let i = r.first[s]; i < stop; i++) if (r.marks[8 * i + 4] === 0) last = i;
    for (let i = r.first[s]; i < stop; i++) {
        const start = r.times[4 * i], cause = i === r.first[s] ? 0 : i <= last ? 1 : 2;
        if (start > at + 1e-9) seen(at, start, cause);
        at = Math.max(at, r.times[4 * i + 1]);
    }
    if (r.makespan > at + 1e-9) seen(at, r.makespan, 3);
}

// Returns the idle time of all stages by cause.
function idleOf(r) {
    const sums = [0, 0, 0, 0];
    const add = (start, end, cause) => { sums[cause] += end - start; };
    for (let s = 0; s < r.p; s++) eachIdle(r, s, add);
    return sums;
}
function idleText(r) {
    const texts = idleOf(r).map((sum, i) => `${CAUSES[i]} ${percent(sum / r.busy)}`);
    return texts.join(", ") + " of compute time";
}

function comparison(r, other) {
    const peak = Math.max(...r.flight), before = Math.max(...other.flight);
    const change = r.makespan / other.makespan - 1;
    const signed = (change > 0 ? "+" : "") + (100 * change).toFixed(1);
    const times = `${short(r.makespan)} instead of ${short(other.makespan)}`;
    return `the step takes ${times} (${signed}%), ` +
           `the bubble is ${percent(r.bubble)} instead of ${percent(other.bubble)}, and ` +
           `a stage keeps at most ${peak} instead of ${before} activations` +
           (r.v !== other.v ? ` (one of ${r.v} chunks is 1/${r.v} of a stage)` : "");
}

// Returns the way of a micro-batch through the stages, as rows of facts: its steps in the order of
// time, and their code.
function wayOf(r, micro) {
    const steps = [];
    for (let s = 0; s < r.p; s++) {
        for (let i = r.first[s]; i < r.first[s + 1]; i++) {
            const kind = r.marks[8 * i + 4], chunk = r.marks[8 * i + 6];
            if (kind <= 2 && r.marks[8 * i + 5] === micro)
                steps.push({s, kind, chunk, start: r.times[4 * i], end: r.times[4 * i + 1]});
        }
    }
    steps.sort((a, b) => a.start - b.start);
    const joined = (list, most) =>
        list.slice(0, most).join(", ") + (list.length > most ? " ..." : "");
    const text = joined(steps.map(x => {
        const chunk = r.v > 1 ? "." + x.chunk : "";
        return `${"FBW"[x.kind]}${chunk} on stage ${x.s} at ${short(x.start)}`;
    }), 48);
    const last = r.split ? 2 : 1, held = [];
    for (let s = 0; s < r.p && s < 16; s++) {
        const own = steps.filter(x => x.s === s), from = own.find(x => x.kind === 0);
        const to = own.filter(x => x.kind === last);
        if (!from || !to.length) continue;
        held.push(`stage ${s} for ${short(to[to.length - 1].end - from.start)}`);
    }
    const links = [];
    const parts = [["the loop over the list", "run_batch"], ["its receive", "link_receive"],
                   ["forward of a chunk", "forward"], ["its send", "link_send"],
                   ["backward of a chunk", "backward"]];
    for (const [what, name] of parts) {
        const file = "train_gpt_pp.cu", text = `${what} (line ${LINES[file][name]})`;
        links.push(links.length ? ", " : file + ": ", sourceLink(text, file, name));
    }
    const hops = kind => steps.filter(x => x.kind === kind).flatMap((x, k, own) => {
        const before = own[k - 1];
        return k && before.s !== x.s ? [`${before.s} to ${x.s} from ${short(before.end)}`] : [];
    });
    const up = hops(0), down = hops(1);
    const messages = `${up.length + down.length}: activations of stage ${joined(up, 12)}; ` +
        `gradients of stage ${joined(down, 12)}`;
    return [[`Micro-batch ${micro}`, text],
            ["Its messages", up.length ? messages : "none: there is one stage"],
            ["Its activations are kept", held.join(", ")],
            ["The code that runs", links]];
}

// Returns the time from the first start to the last end of each stage's steps. They are in the
// order of time; messages come after them.
function ownSpans(r) {
    return Array.from({length: r.p}, (_, s) => {
        const first = r.first[s];
        let last = r.first[s + 1] - 1;
        while (last >= first && r.marks[8 * last + 4] > 2) last--;
        return last >= first ? Math.max(0, r.times[4 * last + 1] - r.times[4 * first]) : 0;
    });
}

const MARGIN = {left: 64, get right() { return narrow() ? 44 : 54; }, top: 6};

// Pixels from the left of a timeline to its right; a canvas may have some 16,000 of the screen's.
let zoom = 1;
const axisRoom = () => Math.min(zoom * roomFor(360), Math.max(8000, roomFor(360)));

function drawSchedule() {
    const r = shown, other = beside(), end = Math.max(r.makespan, other ? other.makespan : 0, 1e-9);
    const now = timeShown === null ? end : Math.min(timeShown, end);
    if (other) drawTimeline($("pinned"), other, now, end);
    drawTimeline($("timeline"), r, now, end);
    const what = `timeline of ${r.p} stages and ${r.m} micro-batches up to time ${short(now)}`;
    $("timeline").setAttribute("aria-label", what);
    $("time").value = String(Math.round(now / end * 1000));
    $("clock").textContent = `time ${playing ? now.toFixed(1) : short(now)} of ${short(end)}`;
    $("time").setAttribute("aria-valuetext", $("clock").textContent);
    drawFlight(r, Math.min(now, r.makespan), end);
}

// Labels the stages that have room for their number, among them the last.
function labelStages(g, count, row, height, top) {
    const every = Math.ceil(13 / row);
    for (let s = 0; s < count; s++) {
        const y = top + s * row + height / 2;
        if (s === count - 1 || (s % every === 0 && (count - 1 - s) * row >= 13))
            label(g, (s ? "" : "stage ") + s, MARGIN.left - 8, y, {align: "right"});
    }
}

function drawTimeline(canvas, r, now, end) {
    const lanes = Number(r.values.transfer) > 0 && r.p <= MOST_LANES, row = rowHeight(r.p);
    const gap = row > 12 ? 3 : row > 7 ? 1 : 0, box = row - gap - (lanes ? 6 : 0);
    const width = axisRoom();
    const g = paper(canvas, width, MARGIN.top + r.p * row + 22);
    const scale = (width - MARGIN.left - MARGIN.right) / end, x = t => MARGIN.left + t * scale;
    const shades = STEPS.map(name => Array.from({length: r.v}, (_, c) =>
        mix(...COLORS[name], r.v > 1 ? c / (r.v - 1) * 0.85 : 0)));
    const numbers = shade => shade.match(/[0-9]+/g).map(Number);
    const colors = Float64Array.from(shades.flat().flatMap(numbers));
    const idle = hatching(g), follow = r.values.follow === "" ? -1 : Number(r.values.follow);
    let labels = null;  // only rows that are not crowded have any
    labelStages(g, r.p, row, row, MARGIN.top);
    for (let s = 0; s < r.p; s++) {
        const y = MARGIN.top + s * row;
        g.fillStyle = COLORS.ground;
        g.fillRect(MARGIN.left, y, r.makespan * scale, box);
        if ((r.first[s + 1] - r.first[s]) * 3 > width) {
            drawCrowdedRow(g, r, s, y, box, scale, Math.min(now, r.makespan), colors);
        } else {
            eachIdle(r, s, (from, to, cause) => {
                if (from >= now) return;
                const a = x(from), b = x(Math.min(to, now)), text = r.hangs ? "" : CAUSES[cause];
                g.fillStyle = idle;
                g.fillRect(a, y, b - a, box);
                if (!text || box < 12 || b - a < 6.5 * text.length + 8) return;
                g.fillStyle = COLORS.ground;
                g.fillRect((a + b) / 2 - 3.1 * text.length, y + 2, 6.2 * text.length, box - 4);
                label(g, text, (a + b) / 2, y + box / 2,
                      {size: 11, color: COLORS.muted, align: "center"});
            });
            labels = labels || labelsOf(r, scale, box);
            drawRow(g, r, s, y, box, x, now, shades, lanes, follow, labels);
        }
    }
    if (hand && r === shown) drawHand(g, r, row, box, x);
    if (follow >= 0) drawWay(g, r, follow, row, box, x, now);
    if (now < end || r.hangs) {
        const at = Math.min(now, r.hangs ? r.makespan : end);
        g.fillStyle = r.hangs && now >= end ? COLORS.orange : COLORS.text;
        g.fillRect(x(at), MARGIN.top, 1.5, r.p * row);
    }
    if (r.hangs && now >= end) drawCircle(g, r, row, x(r.makespan));
    drawAxis(g, end, scale, MARGIN.top + r.p * row);
}

// Returns the size of the labels of each kind. Also returns their letter if the shortest box has
// room for it. size 0: there is no room for a number.
function labelsOf(r, scale, height) {
    const least = [Infinity, Infinity, Infinity], digits = String(r.m - 1).length;
    for (let i = 0; i < r.count; i++) {
        const kind = r.marks[8 * i + 4];
        const wide = scale * (r.times[4 * i + 1] - r.times[4 * i]);
        if (kind < 3) least[kind] = Math.min(least[kind], wide);
    }
    return least.map((wide, kind) => {
        const long = Math.min(13, height - 3, (wide - 4) / (0.64 * (digits + 1)));
        const size = long >= 8 ? long : Math.min(13, height - 3, (wide - 2) / (0.57 * digits));
        return {letter: long >= 8 ? "FBW"[kind] : "", size: size >= 7 ? size : 0};
    });
}

// Draws a row whose boxes can be told apart. Their kinds differ without colour as well: a backward
// has a line at its foot, the weight half a broken one. If there is room, the letter stands before
// the number of the micro-batch.
function drawRow(g, r, s, y, height, x, now, shades, lanes, follow, labels) {
    for (let i = r.first[s]; i < r.first[s + 1]; i++) {
        const start = r.times[4 * i], stop = r.times[4 * i + 1], kind = r.marks[8 * i + 4];
        if (start >= now) continue;
        const a = x(start), b = x(Math.min(stop, now)), micro = r.marks[8 * i + 5];
        const faded = follow >= 0 && micro !== follow;
        g.globalAlpha = faded ? 0.3 : 1;
        if (kind > 2) {
            if (lanes) {
                g.fillStyle = kind === 3 ? COLORS.send : COLORS.receive;
                g.fillRect(a, y + height + (kind === 3 ? 0 : 3), Math.max(b - a, 1), 3);
            }
            continue;
        }
        const wide = Math.max(b - a - (b - a > 5 ? 1 : 0), 1);
        const dark = r.v === 1 || r.marks[8 * i + 6] < r.v / 2;
        const ink = dark && kind !== 2 ? "#fff" : COLORS.ink;
        if (faded) {  // over the hatching
            g.globalAlpha = 1;
            g.fillStyle = COLORS.paper;
            g.fillRect(a, y, wide, height);
            g.globalAlpha = 0.3;
        }
        g.fillStyle = shades[kind][r.marks[8 * i + 6]];
        g.fillRect(a, y, wide, height);
        if (wide < 5 || height < 10) continue;
        g.fillStyle = ink;
        if (kind === 1) g.fillRect(a + 1, y + height - 3, wide - 2, 1.5);
        for (let dash = a + 1; kind === 2 && dash < a + wide - 2; dash += 5)
            g.fillRect(dash, y + height - 3, 2.5, 1.5);
        const {letter, size} = labels[kind], text = letter + micro;
        if (size && b - a >= 0.57 * size * text.length)
            label(g, text, (a + b - 1) / 2, y + (height - 1) / 2,
                  {size, color: ink, align: "center"});
    }
    g.globalAlpha = 1;
}

// Draws the way of one micro-batch: a line from each of its steps to the next one on another stage.
function drawWay(g, r, micro, row, box, x, now) {
    const steps = [];
    for (let s = 0; s < r.p; s++)
        for (let i = r.first[s]; i < r.first[s + 1]; i++)
            if (r.marks[8 * i + 4] < 2 && r.marks[8 * i + 5] === micro && r.times[4 * i] < now)
                steps.push([r.times[4 * i], r.times[4 * i + 1], s]);
    steps.sort((a, b) => a[0] - b[0]);
    const y = s => MARGIN.top + s * row + box / 2;
    for (let k = 1; k < steps.length; k++) {
        const [, end, from] = steps[k - 1], [start, , to] = steps[k];
        if (to !== from && row >= 10)
            arrow(g, x(end) - 1, y(from), x(start) + 1, y(to), COLORS.orange);
    }
}

// Draws a row with more boxes than pixels. Each column of pixels has the mean colour of its boxes.
// colors: red, green and blue of each kind and chunk.
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
    const image = crowded.createImageData(Math.max(columns, 1), 1);
    const idle = [1, 3, 5].map(i => parseInt(COLORS.ground.slice(i, i + 2), 16));
    for (let column = 0; column < columns; column++) {
        const free = Math.max(0, 1 - sums[4 * column + 3]);
        for (let k = 0; k < 3; k++)
            image.data[4 * column + k] = sums[4 * column + k] + free * idle[k];
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
              ring.includes(s) ? COLORS.orange : COLORS.circle);
    }
}

function drawAxis(g, end, scale, y) {
    const power = 10 ** Math.floor(Math.log10(end / 8)), lead = end / 8 / power;
    const step = power * (lead <= 1 ? 1 : lead <= 2 ? 2 : lead <= 5 ? 5 : 10);
    for (let t = 0; t <= end * 1.0001; t += step) {
        const x = MARGIN.left + t * scale;
        g.fillStyle = COLORS.grid;
        g.fillRect(x, y, 1, 5);
        label(g, short(t), x, y + 13, {size: 11, color: COLORS.muted, align: "center"});
    }
}

function drawSteps(g, most, columns, base, unit) {
    g.fillStyle = COLORS.share;
    for (let column = 0, from = 0; column < columns; column++) {
        if (column + 1 < columns && most[column + 1] === most[from]) continue;
        const height = most[from] * unit;
        g.fillRect(MARGIN.left + from, base - height, column + 1 - from, height);
        from = column + 1;
    }
}

// Draws the same pixel by pixel: a thousand rows have a million steps.
function drawPixels(g, most, columns, base, height, unit) {
    if (columns < 1) return;
    const image = crowded.createImageData(columns, height);
    const pixels = new Uint32Array(image.data.buffer);
    const [red, green, blue] = [1, 3, 5].map(i => parseInt(COLORS.share.slice(i, i + 2), 16));
    const color = (255 << 24 | blue << 16 | green << 8 | red) >>> 0;
    for (let column = 0; column < columns; column++) {
        const top = Math.round(height - most[column] * unit);
        for (let y = top; y < height; y++) pixels[y * columns + column] = color;
    }
    crowded.canvas.width = columns;
    crowded.canvas.height = height;
    crowded.putImageData(image, 0, 0);
    g.drawImage(crowded.canvas, MARGIN.left, base - height);
    crowded.canvas.height = 1;
}

// Draws the micro-batches and chunks whose activations a stage holds: from the start of a forward
// to the end of the last step that reads them.
function drawFlight(r, now, end) {
    const peak = Math.max(1, ...r.flight), row = Math.max(6, Math.min(30, Math.floor(420 / r.p)));
    const width = axisRoom();
    const g = paper($("flight"), width, MARGIN.top + r.p * row + 4), last = r.split ? 2 : 1;
    const scale = (width - MARGIN.left - MARGIN.right) / end, every = Math.ceil(13 / row);
    for (let s = 0; s < r.p; s++) {
        const base = MARGIN.top + (s + 1) * row - 1, unit = (row - 3) / peak;
        const columns = Math.ceil(now * scale);
        const most = new Int32Array(columns + 1);  // held in each column of pixels
        let held = 0, at = 0;
        const {times, marks} = r, stop = r.first[s + 1];
        for (let i = r.first[s]; i <= stop; i++) {
            const kind = i < stop ? marks[8 * i + 4] : last;
            const change = i === stop ? now : kind === 0 ? times[4 * i] : times[4 * i + 1];
            if ((kind !== 0 && kind !== last) || change > now) continue;
            const to = Math.min(columns, Math.max(at, Math.ceil(change * scale)));
            for (let column = Math.max(0, at - 1); column < to; column++)
                most[column] = Math.max(most[column], held);
            at = to;
            if (i < stop) held += kind === 0 ? 1 : -1;
        }
        if (r.p > MOST_LANES) drawPixels(g, most, columns, base, row - 3, unit);
        else drawSteps(g, most, columns, base, unit);
        g.fillStyle = COLORS.grid;
        g.fillRect(MARGIN.left, base, end * scale, 1);
        if (s !== r.p - 1 && (s % every || (r.p - 1 - s) * row < 13)) continue;
        label(g, (s ? "" : "stage ") + s, MARGIN.left - 8, base - row / 2 + 1, {align: "right"});
        const text = now < r.makespan ? `${held} / ${r.flight[s]}` : `max ${r.flight[s]}`;
        label(g, text, width - MARGIN.right + 5, base - row / 2 + 1, {size: Math.min(12, row + 4)});
    }
    const most = [...r.flight].join(", ");
    $("flight").setAttribute("aria-label", "most activations in flight on each stage: " + most);
}

// Returns the next time at which something begins or ends, in a direction; undefined: there is
// none.
function momentFrom(r, now, direction) {
    let best = direction * Infinity;
    for (let i = 0; i < r.count; i++) {
        for (const t of [r.times[4 * i], r.times[4 * i + 1]])
            if (direction * (t - now) > 1e-9 && direction * (best - t) > 0) best = t;
    }
    return Number.isFinite(best) ? best : undefined;
}

function moveTime(direction) {
    const end = shown.makespan, now = timeShown === null ? end : timeShown;
    const next = momentFrom(shown, now, direction);
    timeShown = next === undefined ? (direction > 0 ? null : 0) : next >= end ? null : next;
    drawSchedule();
    keepAddress();
}

// ---- the player ---------------------------------------------------------------------------------

let playing = 0;

function stop() {
    if (playing) clearInterval(playing), playing = 0, keepAddress();
    $("play").textContent = $("ringplay").textContent = "play";
}

function play() {
    if (playing) return stop();
    $("play").textContent = $("ringplay").textContent = "stop";
    if (panel === "collectives") {
        if (roundShown >= ringShown.rounds) roundShown = 0, drawRing();
        playing = setInterval(() => {
            moveRound(1);
            if (roundShown >= ringShown.rounds) stop();
        }, 900);
    } else {
        const end = shown.makespan, pace = end / Math.min(120, Math.max(60, 2 * shown.count));
        if (timeShown === null) timeShown = 0;
        playing = setInterval(() => {
            timeShown = Math.min(end, timeShown + pace);
            if (timeShown >= end) timeShown = null, stop();
            drawSchedule();
        }, 50);
    }
}

