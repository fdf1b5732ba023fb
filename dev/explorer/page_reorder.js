// ---- reordering a list --------------------------------------------------------------------------

// The step in hand: its stage s, its place i in that stage's list, its new place `to`. The pointer
// (from: the place where it went down) or the keys move it.
let hand = null, dropped = 0;
const HINT = "A click on a box follows its micro-batch. Drag a box along its row, or press up or " +
             "down and then Shift with left or right, to reorder its stage's list.";

// Shows the text on the box under the pointer, or the hint. A drop's verdict stays for a while.
function hover(text) {
    if (performance.now() - dropped > 1500) $("under").textContent = text || HINT;
}

const crowdedRow = (r, s) => (r.first[s + 1] - r.first[s]) * 3 > axisRoom();

// Returns the number of steps of a stage that ran: its boxes that are no messages.
function stepCount(r, s) {
    const isStep = at => r.marks[8 * at + 4] < 3;
    let count = 0;
    while (r.first[s] + count < r.first[s + 1] && isStep(r.first[s] + count)) count++;
    return count;
}

const stepText = (r, s, i) => {
    const at = 8 * (r.first[s] + i);
    return "FBW"[r.marks[at + 4]] + r.marks[at + 5] + (r.v > 1 ? "." + r.marks[at + 6] : "");
};

// Returns the fields of the shown schedule with one step moved, as a list.
async function withMoved({s, i, to}, ask) {
    const lines = (await ask("list", question(state.schedules))).split("\n");
    const steps = lines[s].split(" ");
    steps.splice(to, 0, ...steps.splice(i, 1));
    lines[s] = steps.join(" ");
    const kind = inV(state.schedules.kind) ? "v-list" : "list";
    return {...state.schedules, kind, limit: "", list: lines.join("\n")};
}

function verdict(r, before) {
    if (r.hangs || !r.proved) return r.sentence;
    const change = r.makespan === before ? " as before" : " instead of " + short(before);
    return `cannot hang; the step takes ${short(r.makespan)}${change}`;
}

// Says what the proof says of the place where the step in hand would go.
async function sayProof() {
    const {s, i, to} = hand, r = shown, what = `Stage ${s}, ${stepText(r, s, i)} to place ${to}: `;
    let text;
    try {
        const moved = question(await withMoved(hand, askProof));
        text = verdict(await askProof("schedule", moved), r.makespan);
    } catch (e) {
        if (e.message === "superseded") return;
        text = "refused: " + e.message;
    }
    if (hand && hand.s === s && hand.i === i && hand.to === to)
        $("under").textContent = what + text;
}

// Moves the step in hand for good. A refused move leaves the list as it was.
async function drop({s, i, to}) {
    const values = await withMoved({s, i, to}, askAside);
    const what = stepText(shown, s, i), before = shown.makespan;
    if (await take("schedules", values)) {
        $("under").textContent = `Stage ${s}, ${what} at place ${to}: ${verdict(shown, before)}`;
        return true;
    }
    const sentence = $("refusal").textContent;
    fillFields("schedules", state.schedules);
    showSchedule();
    refuse(`${sentence}. The list stays as it was`);
    document.querySelector("main").classList.remove("stale");
    return false;
}

// Outlines the step in hand, and marks the place to which it would go.
function drawHand(g, r, row, box, x) {
    const {s, i, to} = hand, count = stepCount(r, s), start = k => r.times[4 * (r.first[s] + k)];
    if (i >= count) return;
    const y = MARGIN.top + s * row, end = r.times[4 * (r.first[s] + i) + 1];
    g.strokeStyle = COLORS.focus;
    g.lineWidth = 3;
    g.strokeRect(x(start(i)) + 1, y + 1, Math.max(2, x(end) - x(start(i)) - 3), box - 2);
    if (to === i) return;
    const before = to < i ? to : to + 1;  // of the list as it is
    const at = before < count ? x(start(before)) : x(r.times[4 * (r.first[s] + count - 1) + 1]);
    g.fillStyle = COLORS.focus;
    g.fillRect(at - 2.5, y - 3, 5, box + 6);
}

function letGo() {
    hand = null;
    $("under").textContent = HINT;
    drawSchedule();
}

$("timeline").onpointerdown = event => {
    const at = inBox($("timeline"), shown, event);
    if (event.button !== 0 || !at || at.micro === null || crowdedRow(shown, at.s)) return;
    hand = {s: at.s, i: at.i, to: at.i, from: event.clientX, pulled: false};
    $("timeline").setPointerCapture(event.pointerId);
};
$("timeline").onpointermove = event => {
    if (!hand || hand.from === undefined) {
        hover((inBox($("timeline"), shown, event) || {}).text);
        return;
    }
    hand.pulled = hand.pulled || Math.abs(event.clientX - hand.from) > 5;
    if (!hand.pulled) return;
    const {s, i} = hand, first = shown.first[s], t = timeAt($("timeline"), event);
    let to = 0;  // as many steps stand before it as have their middle to the left
    for (let k = 0; k < stepCount(shown, s); k++) {
        const at = 4 * (first + k), middle = (shown.times[at] + shown.times[at + 1]) / 2;
        to += Number(k !== i && middle < t);
    }
    if (to === hand.to) return;
    hand.to = to;
    drawSchedule();
    sayProof();
};
$("timeline").onpointerup = async () => {
    if (!hand || hand.from === undefined) return;
    const mine = hand;
    hand = null;
    if (!mine.pulled) return;
    dropped = performance.now();
    stop();
    drawSchedule();
    if (mine.i !== mine.to) await drop(mine);
};
$("timeline").onpointercancel = letGo;
$("timeline").onpointerleave = () => { if (!hand) hover(); };
$("timeline").onblur = () => { if (hand && hand.from === undefined) letGo(); };

// Keys on the timeline that concern a step in hand. True if they do.
function handKey(event) {
    const r = shown, up = {ArrowUp: -1, ArrowDown: 1}[event.key];
    const along = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (hand && hand.from !== undefined) return event.key === "Escape" && (letGo(), true);
    if (up) {
        const s = hand ? hand.s + up : up > 0 ? 0 : r.p - 1;
        const now = hand ? r.times[4 * (r.first[hand.s] + hand.i)] : timeShown || 0;
        if (s < 0 || s >= r.p || crowdedRow(r, s) || !stepCount(r, s)) return true;
        let i = 0;  // the step that runs at that time
        while (i + 1 < stepCount(r, s) && r.times[4 * (r.first[s] + i + 1)] <= now + 1e-9) i++;
        hand = {s, i, to: i};
    } else if (hand && along) {
        const to = hand.i + along;
        if (to < 0 || to >= stepCount(r, hand.s)) return true;
        if (event.shiftKey) {
            const {s, i} = hand;
            drop({s, i, to}).then(ok => {
                const now = ok ? to : i;
                // It may be one that does not begin.
                hand = now < stepCount(shown, s) ? {s, i: now, to: now} : null;
                drawSchedule();
            });
            return true;
        }
        hand = {s: hand.s, i: to, to};
    } else if (hand && event.key === "Enter") {
        follow(r.marks[8 * (r.first[hand.s] + hand.i) + 5]);
        return true;
    } else if (hand && event.key === "Escape") {
        letGo();
        return true;
    } else return false;
    drawSchedule();
    $("under").textContent = `Stage ${hand.s}, ${stepText(r, hand.s, hand.i)}, place ${hand.i}. ` +
        "Left and right choose, with Shift they move it, Enter follows it, Escape ends.";
    return true;
}
