// ---- context parallelism: a ring of attention ---------------------------------------------------

const CONTEXT_OPS = ["zigzag attention", "contiguous attention"];
const CHUNKS = 32;  // of a row of the C's cells

async function runContext(values) {
    const n = number(values, "n", "ranks", 2, 16, true);
    const size = number(values, "size", "MiB of the buffer", 0.001, 1e6);
    const {work, ranks} = await ask("context", {n, zigzag: Number(values.op === CONTEXT_OPS[0])});
    const sum = list => list.reduce((a, b) => a + b, 0);
    const slowest = sum(work.map(step => Math.max(...step)));
    const r = {op: values.op, n, rounds: n - 1, work, bytes: size * 2 ** 20, slowest,
               mean: sum(work.flat()) / n, rank: (k, q, key) => ranks[k][q * CHUNKS + key]};
    return () => { ringShown = r; showContext(); };
}

function showContext() {
    const r = ringShown, c = r.n, keys = (c - 1) * r.bytes;
    roundShown = Math.max(0, Math.min(r.rounds, Math.floor(roundShown) || 0));
    $("round").max = String(r.rounds);
    const times = (r.slowest / r.mean).toFixed(3), all = keys + 2 * c * r.bytes;
    facts("ringfacts", [
        ["Balance", `the slowest rank of each step has ${r.slowest} pairs of chunks in all, ` +
                    `the mean rank ${r.mean}: ${times} times as long`],
        ["By the formula", `zigzag 1, contiguous 2 - 1/${c} = ${(2 - 1 / c).toFixed(3)}`],
        ["A rank sends, forward", `${bytesText(keys)}: keys and values of ${bytesText(r.bytes)}, ` +
                                  `${c - 1} times`],
        ["Backward", `${bytesText(all)}: keys and values in bf16 again, and their gradients in ` +
                     `fp32, ${c} times`]]);
    drawContext();
    $("numbers").textContent = JSON.stringify({
        op: r.op, n: c, rounds: r.rounds, sent: keys, counted: r.slowest, last: r.work});
}

// Queries down, keys across, a cell for each pair of chunks; the steps before are pale. Beside it
// each rank's work.
function drawContext() {
    const r = ringShown, c = r.n, k = roundShown;
    const side = Math.floor(Math.min(460, roomFor(320) - 150) / 2 / c);
    const size = 2 * c * side, left = size + 24, unit = 100 / Math.max(...r.work.flat());
    const g = paper($("ring"), left + 126, Math.max(size + 4, 22 + 24 * c));
    for (let q = 0; q < 2 * c; q++) {
        for (let key = 0; key <= q; key++) {
            const x = key * side + 2, y = q * side + 2;
            g.strokeStyle = COLORS.hatch;
            g.lineWidth = 1;
            g.strokeRect(x, y, side, side);
            for (let step = 0; step <= k; step++) {
                const rank = r.rank(step, q, key);
                if (rank < 0) continue;
                g.globalAlpha = step === k ? 1 : 0.3;
                g.fillStyle = rankColor(rank, c);
                g.beginPath();
                g.moveTo(x, y);
                if (key < q) g.lineTo(x + side, y);
                g.lineTo(x + side, y + side);
                g.lineTo(x, y + side);
                g.fill();
                g.globalAlpha = 1;
            }
        }
    }
    label(g, "work in this step", left, 10, {color: COLORS.muted});
    if (size > 150) {  // in the empty half: queries attend to no later keys
        label(g, "keys of chunk 0, 1, ... \u2192", size, 12, {color: COLORS.muted, align: "right"});
        label(g, "queries \u2193", size, 30, {color: COLORS.muted, align: "right"});
    }
    for (let rank = 0; rank < c; rank++) {
        const y = 22 + 24 * rank, work = r.work[k][rank];
        g.fillStyle = rankColor(rank, c);
        g.fillRect(left, y, unit * work, 14);
        label(g, `rank ${rank}: ${plural(work, "pair")}`, left + 4, y + 7,
              {color: work ? COLORS.ink : COLORS.muted});
    }
    $("ringnote").textContent = k === 0
        ? `Step 1 of ${c}: every rank attends from its own queries (down) to its own keys ` +
          "(across), causally."
        : `Step ${k + 1} of ${c}: rank i has the keys of rank i - ${k}, sent while it computed. ` +
          "Pale: earlier steps.";
    $("round").value = String(k);
    $("roundtext").textContent = `step ${k + 1} of ${c}`;
    $("round").setAttribute("aria-valuetext", $("roundtext").textContent);
    $("ring").setAttribute("aria-label", $("ringnote").textContent);
}

