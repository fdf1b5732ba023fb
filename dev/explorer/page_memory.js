// ---- memory: a stage's buffers, and curves over the sizes ---------------------------------------

let stageShown = null;  // whose buffers are listed; null: none

async function openStage(stage) {
    const r = laid;
    stageShown = stage;
    keepAddress();
    drawBytes();
    $("buffersbox").hidden = stage === null;
    if (stage === null) return;
    let list;
    try {
        list = await askAside("buffers", {...r.question, stage});
    } catch (e) {
        return;  // another one was asked for
    }
    if (laid !== r || stageShown !== stage) return;
    r.buffers = list;
    const names = ["part", "buffer", "bytes", "of the stage"];
    const total = stageBytes(r, r.stages[stage]);
    list.sort((a, b) => b.bytes - a.bytes);
    const most = narrow() ? 8 : 20, rows = list.slice(0, most).map(({arena, bytes, name}) => {
        const bar = document.createElement("i"), box = document.createElement("span");
        bar.style.width = (200 * bytes / total).toFixed(1) + "px";
        bar.style.background = PARTS.find(([part]) => part === arena)[1];
        box.append(bar, (100 * bytes / total).toFixed(1) + "%");
        box.className = "bar";
        return tableRow("td", [arena, name.replace("%zu", "*"), bytesText(bytes), box], names);
    });
    const rest = list.slice(most).reduce((sum, x) => sum + x.bytes, 0);
    const smaller = `${list.length - most} smaller ones`;
    if (rest) rows.push(tableRow("td", ["", smaller, bytesText(rest), ""], names));
    const links = document.createElement("span"), file = sourceOf(r.values);
    for (const name of ["layout", "layout_acts"]) {
        links.append(name === "layout" ? "" : " and ",
                     sourceLink(`${name} (line ${LINES[file][name]})`, file, name));
    }
    $("buffersnote").replaceChildren(
        `Stage ${stage}: the largest buffers of its first rank, by their names in ${file}, `,
        links, ". Those of one name are added up.");
    $("buffers").replaceChildren(tableRow("th", names, [], "col"), ...rows);
}

$("bytes").onclick = event => {
    const top = $("bytes").getBoundingClientRect().top + bytesTop;
    const stage = Math.floor((event.clientY - top) / bytesRow(laid));
    if (stage >= 0 && stage < laid.p) openStage(stage === stageShown ? null : stage);
};
$("bytes").onkeydown = event => {
    const by = {ArrowUp: -1, ArrowDown: 1}[event.key];
    if (!by && event.key !== "Escape") return;
    event.preventDefault();
    const to = stageShown === null ? (by > 0 ? 0 : laid.p - 1) : stageShown + by;
    if (!by) openStage(null);
    else if (to >= 0 && to < laid.p) openStage(to);
};

// The fullest stage over t, p and d, each alone: the points that the trainer accepts, one by one.
const AXES = [["tensor", "t"], ["pipeline", "p"], ["data", "d"]];
let curves = null;
async function fillCurves(r, current) {
    curves = {r, points: AXES.map(() => [])};
    delete $("curves").dataset.done;
    drawCurves();
    for (const [i, [axis]] of AXES.entries()) {
        const others = r.ranks / r[{tensor: "t", data: "d", pipeline: "p"}[axis]];
        const sizes = new Set([Number(r.values[axis])]);
        for (let size = 1; size * others <= MOST_RANKS && size <= 512; size *= 2) sizes.add(size);
        for (const size of [...sizes].sort((a, b) => a - b)) {
            const values = {...r.values, ...suited(r.values, {[axis]: String(size)})};
            if (axis === "tensor" && size === 1) values.sp = "0";
            try {
                const question = {...layoutQuestion(values), rank: Infinity, node: 0};
                const other = await askWhatIf("layout", question);
                if (!current()) return;
                other.reserve = r.reserve;
                curves.points[i].push([size, fullestOf(other)]);
            } catch (e) {
                if (!current() || e.message === "superseded") return;
            }
        }
        drawCurves();
    }
    $("curves").dataset.done = "1";
}

function drawCurves() {
    const {r, points} = curves, all = points.flat().map(([, bytes]) => bytes);
    const most = Math.max(1.5 * fullestOf(r), Math.min(2 * r.memory, 1.05 * Math.max(...all)));
    const wide = !narrow(), width = wide ? Math.floor(roomFor(320) / 3) : roomFor(320), high = 150;
    const g = paper($("curves"), wide ? 3 * width : width, wide ? high : 3 * high);
    points.forEach((list, i) => {
        const left = (wide ? i * width : 0) + 10, right = left + width - 44;
        const top = (wide ? 0 : i * high) + 38;
        const bottom = top + high - 68, now = Number(r.values[AXES[i][0]]);
        const largest = Math.max(2, ...list.map(([size]) => size));
        const x = size => left + 14 + (right - left - 20) * Math.log2(size) / Math.log2(largest);
        // Larger values lie at the top.
        const y = bytes => bottom - (bottom - top) * Math.min(bytes / most, 1);
        const title = `${AXES[i][1]}, the others as they are`;
        label(g, title, left, top - 30, {size: 11, color: COLORS.muted});
        g.fillStyle = COLORS.border;
        g.fillRect(left, bottom, right - left, 1);
        if (r.memory <= most) {
            g.fillStyle = COLORS.orange;
            g.fillRect(left, y(r.memory), right - left + 30, 1.5);
            label(g, bytesText(r.memory), right + 30, y(r.memory) - 8,
                  {size: 11, color: COLORS.orange, align: "right"});
        }
        g.strokeStyle = COLORS.violet;
        g.lineWidth = 2;
        g.beginPath();
        for (const [size, bytes] of list) g.lineTo(x(size), y(bytes));
        g.stroke();
        for (const [size, bytes] of list) {
            g.fillStyle = bytes > r.memory ? COLORS.orange : COLORS.violet;
            g.beginPath();
            g.arc(x(size), y(bytes), size === now ? 5 : 3, 0, 2 * Math.PI);
            g.fill();
            if (size === now || Math.abs(x(size) - x(now)) > 18)
                label(g, String(size), x(size), bottom + 11,
                      {size: 11, align: "center", bold: size === now});
        }
        for (const [k, [size, bytes]] of list.entries())
            if (k === 0 || k === list.length - 1 || size === now)
                label(g, bytesText(bytes), x(size) + (k ? 0 : 6), y(bytes) - 10,
                      {size: 11, align: k ? "center" : "left"});
    });
    const texts = points.map((list, i) => {
        const sizes = list.map(([size, bytes]) => `${size}: ${bytesText(bytes)}`);
        return `over ${AXES[i][1]} ${sizes.join(", ")}`;
    });
    $("curves").setAttribute("aria-label", "bytes of the fullest stage: " + texts.join("; "));
}
