// ---- the first frame ----------------------------------------------------------------------------

// The schedule with which the page opens, equal to the C's (the page's test compares them). Each
// stage has the kinds of its steps and the times at which they begin. It is drawn at once. The
// worker, which has to be compiled first, then draws the same.
const FIRST = [
    ["FFFFBFBFBFBFBBBB", [0, 1, 2, 3, 10, 12, 13, 15, 16, 18, 19, 21, 22, 25, 28, 31]],
    ["FFFBFBFBFBFBFBBB", [1, 2, 3, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 26, 29]],
    ["FFBFBFBFBFBFBFBB", [2, 3, 6, 8, 9, 11, 12, 14, 15, 17, 18, 20, 21, 23, 24, 27]],
    ["FBFBFBFBFBFBFBFB", [3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 18, 19, 21, 22, 24, 25]],
];

function firstSchedule() {
    const r = scheduleOf({p: 4, m: 8, v: 1, split: 0, makespan: 33, busy: 96, hangs: 0,
                          flight: [4, 3, 2, 1], first: [0, 16, 32, 48, 64],
                          boxes: new ArrayBuffer(32 * 64)}, {...DEFAULTS.schedules});
    FIRST.forEach(([kinds, starts], s) => {
        const next = [0, 0];  // micro-batch of each kind
        starts.forEach((start, k) => {
            const i = r.first[s] + k, kind = "FB".indexOf(kinds[k]);
            r.times.set([start, start + 1 + kind], 4 * i);
            r.marks.set([kind, next[kind]++], 8 * i + 4);
        });
    });
    return r;
}

const isFirst = r => r !== null && r.formula === undefined;  // the C has not answered yet

// Draws it if the address asks for it: no setting of a schedule, or the first question of the tour.
function drawFirst(hash) {
    if (!["", "#", "#schedules", "#tour", "#tour?step=1"].includes(hash)) return;
    panel = "schedules";
    section(panel).hidden = false;
    document.querySelector("main").classList.toggle("touring", hash.startsWith("#tour"));
    setGuessing(hash.startsWith("#tour"));
    shown = firstSchedule();
    timeShown = hash.startsWith("#tour") ? TOUR[0].until : null;
    fillFields(panel, shown.values);
    drawSchedule();
    $("numbers").dataset.first = String(performance.now());
}
