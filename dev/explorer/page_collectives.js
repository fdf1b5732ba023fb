// ---- collectives --------------------------------------------------------------------------------

let ringShown = null;
const RINGS = [...OPS.slice(0, 4), "all-to-all", "tree all-reduce"], WHOLE = 16;

async function runRing(values) {
    choose(values, "op", "collective", [...RINGS, ...CONTEXT_OPS]);
    if (CONTEXT_OPS.includes(values.op)) return runContext(values);
    const op = RINGS.indexOf(values.op), n = number(values, "n", "ranks", 2, 16, true);
    const size = number(values, "size", "MiB of the buffer", 0.001, 1e6), width = 4;
    const count = Math.max(1, Math.round(size * 2 ** 20 / width / n)) * n;
    const r = await ask("ring", {op, n, count, width});
    Object.assign(r, {
        op: values.op, n, bytes: count * width,
        set: (k, rank, i) => r.sets[k * 256 + rank * 16 + i],
        part: (k, rank) => r.parts[k * 16 + rank],
        next: (k, rank) => r.to[k * 16 + rank],
    });
    return () => { ringShown = r; showRing(); };
}

function showRing() {
    const r = ringShown, k = r.n;
    const tree = r.op === "tree all-reduce", same = !tree && r.op !== "broadcast";
    const times = tree ? `${r.sent / r.bytes} times` : r.op === "broadcast" ? "all"
        : (r.op === "all-reduce" ? "2 " : "") + `(${k} - 1)/${k}`;
    roundShown = Math.max(0, Math.min(r.rounds, Math.floor(roundShown) || 0));
    $("round").max = String(r.rounds);
    facts("ringfacts", [
        [same ? "A rank sends" : "Rank 0 sends",
         `${bytesText(r.sent)} = ${times} of the buffer's ${bytesText(r.bytes)}, in ` +
         `${r.rounds} rounds of ${bytesText(tree ? r.bytes : r.bytes / k)}`],
        tree ? ["A ring's all-reduce", `${bytesText(r.counted)} of each rank, in ` +
                                       `${2 * (k - 1)} rounds of ${bytesText(r.bytes / k)}`]
             : ["NCCL_TRAFFIC counts", `${r.counted} bytes sent`],
        ["All together", bytesText(r.all)],
        ["Rounds", `${r.rounds}: each costs a latency, so many ranks make small buffers slow`]]);
    drawRing();
    const last = [];
    for (let rank = 0; rank < k; rank++)
        last.push(Array.from({length: k}, (_, i) => r.set(r.rounds, rank, i)));
    $("numbers").textContent = JSON.stringify({
        op: r.op, n: k, rounds: r.rounds, sent: r.sent, counted: r.counted, all: r.all, last});
}

const rankColor = (rank, n) => `hsl(${rank * 360 / n}, 62%, 66%)`;

// Draws a row for each rank and a cell for each part of its buffer. A cell has a stripe for each
// rank whose numbers are in it.
function drawRing() {
    if (ringShown.work) return drawContext();
    const r = ringShown, n = r.n, k = roundShown, room = roomFor(320), left = 74;
    const cell = Math.max(26, Math.min(92, Math.floor((room - left - 130) / n)));
    const height = Math.max(22, Math.min(42, cell * 0.7)), row = height + (n > 8 ? 12 : 22);
    const g = paper($("ring"), left + n * cell + 130, 34 + n * row + 10);
    const whole = (1 << n) - 1, sending = k < r.rounds;
    for (let i = 0; i < n; i++) {
        const name = (n > 8 ? "" : "part ") + i;
        label(g, name, left + (i + 0.5) * cell, 16, {color: COLORS.muted, align: "center"});
    }
    const done = (rank, i) => {
        const set = r.set(k, rank, i);
        return r.op === "all-to-all" ? set === 1 << i
            : r.op.endsWith("reduce") || r.op === "reduce-scatter" ? set === whole : set !== 0;
    };
    const sends = (rank, i) => sending && [i, WHOLE].includes(r.part(k, rank));
    for (let rank = 0; rank < n; rank++) {
        const y = 30 + rank * row;
        label(g, `rank ${rank}`, 4, y + height / 2, {bold: true});
        for (let i = 0; i < n; i++) {
            const x = left + i * cell, set = r.set(k, rank, i), stripe = (cell - 8) / n;
            g.fillStyle = done(rank, i) ? COLORS.tokens : set ? COLORS.paper : COLORS.ground;
            g.fillRect(x, y, cell - 4, height);
            for (let q = 0; q < n; q++) {
                if (!(set >> q & 1)) continue;
                g.fillStyle = rankColor(q, n);
                g.fillRect(x + 2 + q * stripe, y + 3, Math.max(1, stripe - 1), height - 6);
                if (stripe < 11) continue;
                label(g, String.fromCharCode(97 + q), x + 2 + (q + 0.5) * stripe, y + height / 2,
                      {align: "center", color: COLORS.ink});
            }
            g.strokeStyle = sends(rank, i) ? COLORS.violet : COLORS.hatch;
            g.lineWidth = sends(rank, i) ? 3 : 1;
            g.strokeRect(x, y, cell - 4, height);
        }
    }
    for (let rank = 0; sending && rank < n; rank++)
        if (r.part(k, rank) >= 0) drawSend(g, r, rank, k, left, cell, row, height);
    const half = r.op === "all-reduce" ? n - 1 : r.op === "reduce-scatter" ? r.rounds : 0;
    const what = {
        broadcast: "a rank hands the part that it has just got to the next rank",
        "all-to-all": "pairs of ranks exchange the outlined parts, as part i is for rank i",
        "tree all-reduce": k < r.rounds / 2 ? "the outlined ranks send all that they " +
            "have, and others add it" : "ranks that have the sum pass it on",
    }[r.op] || `every rank sends the outlined part, and ${k < half ? "the next rank adds its own"
        : "the next rank takes it over"}. So far each has sent ${bytesText(k * r.bytes / n)}`;
    $("ringnote").textContent = sending
        ? `Round ${k + 1} of ${r.rounds}: ${what}.`
        : `Done: ${r.all === n * r.sent ? "each rank" : "rank 0"} has sent ${bytesText(r.sent)} ` +
          `in ${r.rounds} rounds. ` +
          "Green parts are complete.";
    $("round").value = String(k);
    $("roundtext").textContent = `${k} of ${r.rounds} rounds`;
    $("round").setAttribute("aria-valuetext", $("roundtext").textContent);
    $("ring").setAttribute("aria-label", $("ringnote").textContent);
}

// Draws the path of a rank's message: down to the same part of the next rank, and from the last one
// up to the first. In an exchange it goes to the partner's cell, in a tree beside the rows.
function drawSend(g, r, rank, k, left, cell, row, height) {
    const part = r.part(k, rank), x = left + (part + 0.5) * cell - 2, y = 30 + rank * row + height;
    const to = r.next(k, rank), end = 30 + to * row + height;
    if (r.op === "all-to-all") {
        const away = to > rank ? 0 : height;
        return arrow(g, x, y - away, left + (rank + 0.5) * cell - 2, end - height + away,
                     COLORS.violet);
    }
    if (part === WHOLE) {
        const right = left + r.n * cell, far = right + 12 + 14 * Math.log2(Math.abs(to - rank));
        g.strokeStyle = COLORS.violet;
        g.lineWidth = 2;
        g.beginPath();
        g.moveTo(right, y - height / 2);
        g.lineTo(far, y - height / 2);
        g.lineTo(far, end - height / 2);
        g.stroke();
        return arrow(g, far, end - height / 2, right - 4, end - height / 2, COLORS.violet);
    }
    if (rank < r.n - 1) return arrow(g, x, y + 1, x, y + row - height - 1, COLORS.violet);
    const side = left + r.n * cell + 8, top = 30 + height / 2;
    label(g, `${r.n - 1} sends part ${part}`, side + 12, y - height / 2 - 8,
          {color: COLORS.violet});
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

