// ---- events -------------------------------------------------------------------------------------

function redraw() {
    if (panel === "schedules" && shown) drawSchedule();
    if (panel === "layout" && laid) {
        drawGrid();
        drawBytes();
        if (curves) drawCurves();
        if (timed) drawTimeParts();
    }
    if (panel === "collectives" && ringShown) drawRing();
}

function timeAt(canvas, event) {
    const box = canvas.getBoundingClientRect();
    return (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right) *
           Math.max(pinned ? beside().makespan : 0, shown.makespan, 1e-9);
}

// Returns the box under the pointer: {s, i, micro, text}, or null outside. i is its place in its
// stage's list. micro is null beside boxes.
function inBox(canvas, r, event) {
    const top = canvas.getBoundingClientRect().top + MARGIN.top;
    const s = Math.floor((event.clientY - top) / rowHeight(r.p));
    const t = timeAt(canvas, event);
    if (s < 0 || s >= r.p) return null;
    for (let i = r.first[s]; i < r.first[s + 1]; i++) {
        const kind = r.marks[8 * i + 4], micro = r.marks[8 * i + 5];
        if (kind > 2 || r.times[4 * i] > t || r.times[4 * i + 1] < t) continue;
        const chunk = r.v > 1 ? `, chunk ${r.marks[8 * i + 6]}` : "";
        const text = `Stage ${s}, ${STEPS[kind]} of micro-batch ${micro}${chunk}: ` +
            `${short(r.times[4 * i])} to ${short(r.times[4 * i + 1])}. A click follows it, a ` +
            "drag along the row moves it in its stage's list.";
        return {s, i: i - r.first[s], micro, text};
    }
    let text = `Stage ${s} idles at ${short(t)}`;
    const why = (from, to, cause) => { if (from <= t && t <= to) text += ": " + CAUSES[cause]; };
    if (!r.hangs) eachIdle(r, s, why);
    return {s, i: -1, micro: null, text};
}

const models = section("layout").querySelector("[name=model]");
for (const name of Object.keys(MODELS)) models.append(new Option(name, name));
models.prepend(new Option("sizes of your own", ""));
for (const [name, {gpus_per_node, memory}] of Object.entries(CLUSTERS)) {
    const option = new Option(name, name);
    option.title = `${gpus_per_node} GPUs a node, of ${memory / 1e9} GB`;
    section("layout").querySelector("[name=cluster]").append(option);
}

for (const form of document.querySelectorAll("form")) {
    form.addEventListener("submit", event => event.preventDefault());
    form.addEventListener("input", event => changed(event.target));
    // Up and down change a whole number by 1, another one by 0.1.
    form.addEventListener("keydown", event => {
        const field = event.target, by = {ArrowUp: 1, ArrowDown: -1}[event.key];
        const whole = field.inputMode === "numeric";
        if (!by || !/^[0-9]*\.?[0-9]+$/.test(field.value)) return;
        if (!whole && field.inputMode !== "decimal") return;
        event.preventDefault();
        field.value = short(Math.max(0, Number(field.value) + (whole ? by : 0.1 * by)));
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
    const end = Math.max(shown.makespan, pinned ? beside().makespan : 0);
    const at = Number($("time").value) / 1000 * end;
    timeShown = at >= end ? null : at;
    stop();
    drawSchedule();
    keepAddress();
};
$("round").oninput = () => { stop(); roundShown = Number($("round").value); moveRound(0); };
$("pinned").onmousemove = event => hover((inBox($("pinned"), beside(), event) || {}).text);
$("pinned").onmouseleave = () => hover();
for (const [id, which] of [["timeline", () => shown], ["pinned", beside]]) {
    $(id).onclick = event => {
        const box = inBox($(id), which(), event);
        // A drop ends with a click as well.
        if (box && performance.now() - dropped > 300) follow(box.micro);
    };
}

// Follows a micro-batch of the schedule, or none.
function follow(micro) {
    const again = micro === null || String(micro) === state.schedules.follow;
    return take("schedules", {...state.schedules, follow: again ? "" : String(micro)});
}
$("pin").onclick = () => {
    pinned = pinned ? null : shown;
    leaveTour();
    showSchedule();
    keepAddress(true);
};
$("timeline").onkeydown = event => {
    const act = {ArrowLeft: () => moveTime(-1), ArrowRight: () => moveTime(1), " ": play,
                 Home: () => { timeShown = 0; drawSchedule(); keepAddress(); },
                 End: () => { timeShown = null; drawSchedule(); keepAddress(); }}[event.key];
    if (handKey(event)) event.preventDefault();
    else if (act) event.preventDefault(), event.key !== " " && stop(), act();
};
$("ring").onkeydown = event => {
    const act = {
        ArrowLeft: () => moveRound(-1),
        ArrowRight: () => moveRound(1),
        " ": play,
        Home: () => moveRound(-ringShown.rounds),
        End: () => moveRound(ringShown.rounds),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    if (event.key !== " ") stop();
    act();
};
$("grid").onclick = event => {
    const box = $("grid").getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    for (const [key, rank] of laid.cells) {
        const [left, top] = laid.at.of(...key.split(",").map(Number));
        if (x < left || x >= left + laid.at.cell || y < top || y >= top + laid.at.cell) continue;
        chooseRank(rank);
        return;
    }
};
$("grid").onkeydown = event => {
    const move = {
        ArrowLeft: [-1, 0, 0],
        ArrowRight: [1, 0, 0],
        ArrowUp: [0, 0, -1],
        ArrowDown: [0, 0, 1],
        PageUp: [0, -1, 0],
        PageDown: [0, 1, 0],
    }[event.key];
    if (!move) return;
    event.preventDefault();
    moveRank(...move);
};
$("copy").onclick = async () => {
    try {
        await navigator.clipboard.writeText($("command").textContent);
        $("copied").textContent = "copied";
    } catch (e) {  // a page that was opened as a file may not write to the clipboard
        getSelection().selectAllChildren($("command"));
        $("copied").textContent = "selected: press Ctrl-C";
    }
    setTimeout(() => { $("copied").textContent = ""; }, 3000);
};
$("write").onclick = async () => {
    const now = state.schedules, values = {...now, kind: listed};
    if (!byHand(now.kind)) {
        values.kind = inV(now.kind) ? "v-list" : "list";
        values.list = await askAside("list", question(now));
    }
    take("schedules", values);
};
$("zoom").onclick = () => {
    zoom = zoom < 8 ? 2 * zoom : 1;
    $("zoom").textContent = `zoom ${zoom}x`;
    drawSchedule();
};
const rolls = ["pinned", "timeline", "flight"].map(id => $(id).parentElement);  // one axis of time
for (const roll of rolls)
    roll.addEventListener("scroll", () => {
        for (const other of rolls) other.scrollLeft = roll.scrollLeft;
    });
$("undo").onclick = () => history.back();
$("copylink").onclick = async () => {
    try {
        await navigator.clipboard.writeText(location.href);
        $("copylink").textContent = "copied";
    } catch (e) {  // a page that was opened as a file may not write to the clipboard
        $("copylink").textContent = "copy the address";
    }
    setTimeout(() => { $("copylink").textContent = "copy link"; }, 3000);
};
for (const button of document.querySelectorAll(".more"))
    button.onclick = () => button.closest("form").classList.add("all");
darkTheme.addEventListener("change", () => {
    COLORS = THEMES[Number(darkTheme.matches)];
    redraw();
});

$("under").textContent = HINT;
if (inClone) for (const a of document.querySelectorAll('a[href*=".md"]')) a.target = "_blank";
drawFirst(location.hash);
open(location.hash);
