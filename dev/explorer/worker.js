"use strict";
// worker.js: calls the C away from the page, which stays usable meanwhile. A question is {id, job,
// module, values}; the answer is {id, result} or {id, refused}, before which there may be {id,
// progress}. The page ends a worker whose question is no longer of interest.

class Exit extends Error {}

// Returns a fresh program. Its memory is empty, and is freed with the last reference.
async function program(module) {
    const exit = code => { throw new Exit(String(code)); };
    const progress = () => made.text(c.stderr_text).replace(/\r|\x1b\[K/g, "");
    const env = {
        pow: Math.pow,
        cos: Math.cos,
        exp: Math.exp,
        log: Math.log,
        log2: Math.log2,
        fmod: (x, y) => x % y,
        exit: exit,
        _exit: exit,
        page_seconds: () => performance.now() / 1000,
        tell_progress: () => postMessage({id: asking, progress: progress()}),
    };
    const c = (await WebAssembly.instantiate(module, {env})).exports;
    const made = {
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
                if (!(e instanceof Exit))
                    throw new Error("this is too large for the page: " + e.message);
                throw new Error(this.text(c.stderr_text).replace(/^error: /, "").trim());
            }
        },
    };
    return made;
}

const kept = {};  // programs by their use, with what they hold
let asking = 0;   // the question in work

// ---- schedules and collectives ------------------------------------------------------------------

async function runSchedule(q, module) {
    const c = kept.schedule = kept.schedule || await program(module);  // its memory is used again
    if (q.list !== undefined) c.write(c.c.schedule_text, q.list);
    const code = c.call("schedule_run", q.kind, q.p, q.m, q.v, ...q.cost, q.transfer, q.layers,
                        q.limit, q.buffers, q.one, q.lanes);
    if (code === 1) throw new Error(c.text(c.c.stderr_text));
    return c;
}

async function schedule(q, module) {
    const c = await runSchedule(q, module), at = c.c.schedule_result(), x = c.doubles(at, 12);
    const pointers = new Uint32Array(c.c.memory.buffer, at + 96, 5);
    const r = {
        p: x[0],
        m: x[1],
        v: x[2],
        split: x[3],
        makespan: x[4],
        busy: x[5],
        bubble: x[6],
        formula: x[7],
        proved: x[8],
        needs: x[9],
        limit: x[10],
        hangs: x[11],
        sentence: c.text(c.c.stderr_text),
    };
    r.first = c.ints(pointers[1], r.p + 1).slice();
    r.boxes = c.c.memory.buffer.slice(pointers[0], pointers[0] + 32 * r.first[r.p]);
    r.flight = c.ints(pointers[2], r.p).slice();
    r.layers = c.ints(pointers[3], r.p * r.v).slice();
    r.stuck = [];
    const stuck = c.ints(pointers[4], 6 * r.p);
    for (let s = 0; s < r.p; s++) {
        const [type, kind, micro, chunk, peer, input] = stuck.subarray(6 * s, 6 * s + 6);
        r.stuck.push({type, kind, micro, chunk, peer, input});
    }
    return r;
}

// Returns the lines of a schedule's list.
async function list(q, module) {
    const c = await runSchedule(q, module), [p] = c.doubles(c.c.schedule_result(), 1), lines = [];
    for (let s = 0; s < p; s++) {
        c.c.schedule_list(s);
        lines.push(c.text(c.c.schedule_text));
    }
    return lines.join("\n");
}

// Returns for each schedule its time, work, messages, chunks and the activations of each stage.
async function compare(q, module) {
    const c = kept.compare = kept.compare || await program(module), row = 4 + q.p;
    const at = c.call("compare_run", q.p, q.m, ...q.cost, q.transfer, q.pair);
    const x = c.doubles(at, 8 * row);
    return Array.from({length: 8}, (_, i) => {
        const [end, busy, messages, chunks] = x.subarray(row * i, row * i + 4);
        return {end, busy, messages, chunks, held: [...x.subarray(row * i + 4, row * i + row)]};
    });
}

async function ring(q, module) {
    const c = await program(module), at = c.call("ring_run", q.op, q.n, q.count, q.width);
    const [rounds, sent, counted, all] = c.doubles(at, 4), ints = c.ints(at + 32, 32 * 288);
    return {rounds, sent, counted, all, sets: ints.slice(0, 32 * 256),
            parts: ints.slice(32 * 256, 32 * 272), to: ints.slice(32 * 272)};
}

// Returns for each step the work of every rank, and the rank of each cell.
async function context(q, module) {
    const c = await program(module), at = c.call("context_run", q.n, q.zigzag);
    const bytes = 8 * 16 + 4 * 32 * 32;
    const steps = Array.from({length: q.n}, (_, step) => at + step * bytes);
    return {work: steps.map(x => [...c.doubles(x, q.n)]),
            ranks: steps.map(x => c.ints(x + 8 * 16, 32 * 32).slice())};
}

// ---- layouts ------------------------------------------------------------------------------------

const GROUP_COUNT = 9, OP_COUNT = 7, SUMS = 4 * GROUP_COUNT * OP_COUNT, STAGES = 9 + 2 * SUMS;

function bytesOf([layers, slots, weights, gradients, optimizer, activations]) {
    return {layers, slots, weights, gradients, optimizer, activations};
}

function sentOf(x) {
    return Array.from({length: GROUP_COUNT}, (_, g) => Array.from({length: OP_COUNT}, (_, o) => {
        const [calls, sent, received, across] = x.subarray(4 * (g * OP_COUNT + o));
        return {calls, sent, received, across};
    }));
}

// Runs a layout, unless the last one was the same. Returns its program and the address of the
// result.
async function runLayout(q, module) {
    const key = JSON.stringify([q.line, q.t, q.d, q.p, q.node, q.trainer, q.precision]);
    if (kept.key === key) return kept.layout;
    kept.key = null;
    const c = await program(module);
    c.write(c.c.command_text, q.line);
    const at = c.call("layout_run_" + q.precision, c.c.command_text.value, q.t, q.d, q.p, q.node,
                      q.trainer);
    kept.layout = {c, at};
    kept.key = key;
    return kept.layout;
}

function rankOf({c}, q) {
    const x = c.doubles(c.call("layout_rank_" + q.precision, q.rank), STAGES + 6);
    const groups = {}, holds = c.text(c.c.stderr_text);
    for (let i = 0, at; q.trainer === 3 && (at = c.c["layout_group_" + q.precision](i)); i++) {
        const [group, , size, ranks] = c.ints(at, 4);
        groups[group] = [...c.ints(ranks, size)];
    }
    return {sent: sentOf(x.subarray(9 + SUMS)), bytes: bytesOf(x.subarray(STAGES)), groups, holds};
}

async function layout(q, module) {
    const run = await runLayout(q, module), {c, at} = run;
    const x = c.doubles(at, STAGES + 6 * (q.p + 1)), stages = [];
    const r = {
        micros: x[1],
        chunks: x[2],
        parameters: x[3],
        flops: x[4],
        reserve: x[5],
        counted: x[6],
        bubble: x[7],
        formula: x[8],
        stages,
        all: sentOf(x.subarray(9)),
    };
    for (let s = 0; s < q.p; s++) stages.push(bytesOf(x.subarray(STAGES + 6 * (s + 1))));
    r.places = Int32Array.from({length: q.t * q.d * q.p}, (_, rank) =>
        c.call("layout_place_" + q.precision, rank));
    if (q.rank < r.places.length) r.chosen = rankOf(run, q);
    return r;
}

// Returns the buffers of a stage: [{arena, bytes, name}].
async function buffers(q, module) {
    const {c} = await runLayout(q, module);
    c.call("layout_buffers_" + q.precision, q.stage);
    return c.text(c.c.stderr_text).trim().split("\n").map(line => {
        const [arena, bytes, name] = line.split(" ");
        return {arena, bytes: Number(bytes), name};
    });
}

const rank = async (q, module) => rankOf(await runLayout(q, module), q);

// ---- the planner --------------------------------------------------------------------------------

const PLAN_PARTS = ["GEMM", "attention", "memory", "tensor", "pipeline", "data", "optimizer",
                    "host", "idle"];
const PLAN_FIELDS = ["t", "d", "p", "v", "micro", "schedule", "limit", "recompute", "sp", "zero",
                     "shard", "order", "seconds", "memory", "fullest", "mfu", "slowest"];
const PLAN_ROW = PLAN_FIELDS.length + PLAN_PARTS.length;

function planRow(c, at) {
    const x = c.doubles(at, PLAN_ROW);
    const row = Object.fromEntries(PLAN_FIELDS.map((name, i) => [name, x[i]]));
    row.parts = Object.fromEntries(PLAN_PARTS.map((name, i) => [name, x[PLAN_FIELDS.length + i]]));
    return row;
}

function tellPlanner(c, q, flags) {
    c.write(c.c.plan_text, q.cluster);
    c.call("plan_cluster");
    c.write(c.c.plan_text, flags);
}

async function time(q, module) {
    const c = kept.plan = kept.plan || await program(module);  // its memory is used again
    kept.base = null;
    tellPlanner(c, q, q.flags);
    return planRow(c, c.call("plan_time", q.limit));
}

// Returns a sentence on a change of a layout: refused, too large, or slower and why.
async function beside(q, module) {
    const key = JSON.stringify([q.cluster, q.base]);
    if (kept.base !== key) await time({cluster: q.cluster, ...q.base}, module);
    kept.base = key;
    tellPlanner(kept.plan, q, q.flags);
    kept.plan.call("plan_beside", q.limit);
    return kept.plan.text(kept.plan.c.plan_text);
}

async function search(q, module) {
    const c = await program(module);
    tellPlanner(c, q, q.flags);
    const count = c.call("plan_search"), counts = c.text(c.c.plan_text), at = c.c.plan_rows();
    const rows = Array.from({length: count}, (_, i) => planRow(c, at + 8 * PLAN_ROW * i));
    rows.forEach((row, i) => { c.c.plan_flags(i), row.flags = c.text(c.c.plan_text); });
    return {counts, rows};
}

// ---- questions ----------------------------------------------------------------------------------

const JOBS = {schedule, list, compare, ring, context, layout, rank, buffers, time, beside, search};
onmessage = async ({data: {id, job, module, values}}) => {
    asking = id;
    try {
        const result = await JOBS[job](values, module);
        postMessage({id, result}, result.boxes ? [result.boxes] : []);
    } catch (e) {
        postMessage({id, refused: e.message});
    }
};
