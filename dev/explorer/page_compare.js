// ---- all schedules beside each other ------------------------------------------------------------

const COMPARED = [
    "GPipe", "1F1B", "interleaved", "ZB-H1", "ZB-auto", "ZB-V", "V-half", "DualPipeV",
];
const MOST_COMPARED = 1 << 13;  // micro-batches of all stages

// Says why a schedule can be the shortest.
function reasonOf(i, q) {
    const whole = q.cost[0] + q.cost[1] + q.cost[2];
    return [
        "all forwards, then all backwards: no other one is shorter here",
        "no other one is shorter here, and its messages are the fewest",
        "its steps are half as long, so that fill and drain take half the time",
        "weight steps fill the places where a stage would wait for a gradient",
        "it runs up to 2p micro-batches ahead, so that only the wait for the last stage's first " +
            "forward remains",
        "the last stage begins after p - 1 forwards of half a stage, and weight steps fill the " +
            "rest",
        "weight steps fill what its few activations leave open",
        q.pair && q.pair < whole
            ? "a forward and a backward overlap: " +
              `${short(q.pair)} instead of ${short(whole)} for both`
            : "its first and last steps are split backwards, and a middle of pairs never waits"][i];
}

// Returns the index of the shortest schedule that holds at most `most` micro-batches on any stage;
// -1 if there is none. Of equals the one that holds less.
function shortest(rows, most) {
    let best = -1;
    rows.forEach((x, i) => {
        if (!(x.end > 0) || x.peak > most) return;
        const less = best < 0 ? -1 : x.end - rows[best].end;
        if (less < -1e-9 || (less < 1e-9 && x.peak < rows[best].peak)) best = i;
    });
    return best;
}

function winnerSentence(rows, q) {
    const best = shortest(rows, Infinity), held = rows[best].peak, small = shortest(rows, q.p);
    const half = shortest(rows, (q.p + 2) / 2);
    const text = i => `${COMPARED[i]} (${percent(rows[i].bubble)} idle, ` +
                      `${short(rows[i].peak)} micro-batches held)`;
    let sentence = `${text(best)} has the shortest step: ${reasonOf(best, q)}.`;
    if (held > q.p && small >= 0)
        sentence += ` With no more activations than 1F1B's first stage it is ${text(small)}.`;
    if (half >= 0 && half !== best && half !== small)
        sentence += ` With half of them, ${text(half)}.`;
    return sentence;
}

let comparing = 0;
async function compareSchedules(r) {
    const mine = ++comparing, values = r.values, begin = performance.now();
    const q = {p: r.p, m: r.m, cost: ["F", "B", "W"].map(name => Number(values[name])),
               transfer: Number(values.transfer), pair: Number(values.pair)};
    for (const slider of $("durations").querySelectorAll("[data-of]"))
        slider.value = values[slider.dataset.of] || String(q.cost[0] + q.cost[1] + q.cost[2]);
    if (q.p * q.m > MOST_COMPARED) {
        $("winner").textContent =
            `More than ${MOST_COMPARED} micro-batches of all stages are not compared.`;
        $("compared").replaceChildren();
        return;
    }
    const rows = await ask("compare", q);
    if (mine !== comparing) return;
    for (const x of rows) {
        x.bubble = x.end / (x.busy / q.p) - 1;
        x.peak = Math.max(...x.held);
    }
    showCompared(rows, q);
    $("compared").dataset.rows = JSON.stringify(rows);
    $("compared").dataset.ms = String(performance.now() - begin);
}

function showCompared(rows, q) {
    const longest = Math.max(...rows.filter(x => x.end > 0).map(x => x.end));
    const best = shortest(rows, Infinity);
    const row = (cells, tag) => {
        const tr = document.createElement("tr");
        for (const cell of cells) {
            const td = document.createElement(tag);
            td.append(cell);
            tr.append(td);
        }
        return tr;
    };
    const lines = rows.map((x, i) => {
        if (!(x.end > 0)) return row([COMPARED[i], "not for these sizes", "", "", "", ""], "td");
        const bar = document.createElement("div");
        const work = `${COLORS.forward[0]} ${100 / (1 + x.bubble)}%`;
        bar.style.cssText = `height: 10px; width: ${Math.round(160 * x.end / longest)}px; ` +
            `background: linear-gradient(to right, ${work}, ${COLORS.hatch} 0)`;
        const name = document.createElement(i === best ? "strong" : "span");
        name.textContent = COMPARED[i];
        const held = x.held.length > 32 ? `${short(Math.min(...x.held))} to ${short(x.peak)}` :
            x.held.map(short).join(" ");
        return row([name, bar, short(x.end), percent(x.bubble), held, String(x.messages)], "td");
    });
    $("compared").replaceChildren(
        row(["schedule", "step, of it idle in grey", "time", "bubble",
             "most micro-batches held on stage 0, 1, ...", "messages"], "th"), ...lines);
    $("winner").textContent = winnerSentence(rows, q);
}

// A slider writes into the field that it belongs to; the form then takes the values as ever.
for (const slider of $("durations").querySelectorAll("[data-of]")) {
    slider.addEventListener("input", () => {
        section("schedules").querySelector(`[name=${slider.dataset.of}]`).value = slider.value;
    });
}
