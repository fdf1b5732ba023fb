// pipeline_streams.h: a small machine on which pipeline schedules run: a few in-order streams a
// stage, events between them, messages that are a rendezvous. It enqueues the operations of a
// trainer (rule 3 of llmc/pipeline.h) and runs them in virtual time.
//
// Buffers hold names instead of numbers, so a wait that is missing shows up as the wrong name in
// a buffer.
#ifndef LLMC_PIPELINE_STREAMS_H
#define LLMC_PIPELINE_STREAMS_H

#include <math.h>
#include <stdint.h>

#include "llmc/pipeline_lists.h"

// A stage's streams: one for compute, then two for each kind of message. One of these receives
// and one sends. In a V a stage has two chunks, and these two for each kind and chunk.
enum { STREAM_COMPUTE, STREAM_RECEIVE = 1, STREAM_SEND = 2, PORTS = 4, STREAM_COUNT = 9 };
enum { WAIT_INPUT, WAIT_SENT, WAIT_FREE, WAIT_COMPUTED, WAIT_COUNT };

typedef enum { OP_COMPUTE, OP_SEND, OP_RECEIVE } OpType;

// Small, as a large schedule has millions of them.
typedef struct {
    PipelineStep step;      // messages: the step at this end
    unsigned char type;     // OpType
    bool last_use;          // compute: of the slot, which is free afterwards
    signed char waits[2];   // streams of this stage of which up to two operations must be
                            // complete; -1: none
    unsigned wait_index[2]; // which operations these are
    int peer;
    unsigned in, out;       // compute: its buffers; messages: in is their buffer
    unsigned slot;          // activations
    double start, end;
} StreamOp;

typedef struct {
    StreamOp *ops;
    size_t count, next;
    double clock;
    bool only_sends;  // which run from their receiving ends
} Stream;

typedef struct {
    // input
    int p, m, v;
    size_t buffers;
    // Of a forward, an input half and a weight half of one chunk, and of a message.
    double cost[3], transfer;
    const double *scale;  // [p * v] how many times that a global chunk's steps cost; NULL: 1
    int stream_of[STREAM_COUNT];  // {0, 1, 2, 3, 4}, in a V to 8, or several roles on one stream,
                                  // to see it fail
    bool drop[WAIT_COUNT];        // leave a wait out, to see it fail
    uint64_t order;               // 0: streams in turn; else a seed: any ready stream at any moment
    // result
    Stream *streams;        // [p][STREAM_COUNT]
    bool complete;          // false: it hung
    size_t wrong;  // computes that found something else than their input or their activations
    double makespan, busy;  // end of the last compute; sum of all computes
    int *receive_name, *send_name, *slot_name;  // [p][PORTS][buffers], the same, [p][slots]
    size_t slots;
    const PipelineLists *lists;
} Machine;

static inline Stream *machine_stream(Machine *mc, int stage, int role) {
    return &mc->streams[stage * STREAM_COUNT + mc->stream_of[role]];
}

// Returns the number of a step's link ends on its stage.
static inline int machine_port(const Machine *mc, PipelineStep step) {
    return (int)step.kind + (mc->lists->folded ? 2 * step.chunk : 0);
}

static inline void op_wait(Machine *mc, StreamOp *op, int which, int role, size_t index,
                           bool exists) {
    if (!exists || mc->drop[which]) return;
    int place = op->waits[0] < 0 ? 0 : 1;
    op->waits[place] = (signed char)mc->stream_of[role];
    op->wait_index[place] = (unsigned)index;
}

// Adds an operation to the end of a role's stream and returns its index there.
static inline size_t machine_enqueue(Machine *mc, int stage, int role, StreamOp op) {
    Stream *stream = machine_stream(mc, stage, role);
    stream->only_sends = op.type == OP_SEND && (stream->count == 0 || stream->only_sends);
    stream->ops[stream->count] = op;
    return stream->count++;
}

// Enqueues the list of one stage as its host does: rule 3 of pipeline.h.
static inline void machine_enqueue_stage(Machine *mc, int stage, const PipelineStep *steps,
                                         const size_t *slot, size_t count) {
    StepKind last_use = pipeline_last_use(steps, count);
    size_t B = mc->buffers, received[PORTS] = {0}, sends[PORTS] = {0};
    // Indices of the operations that the events stand for, [PORTS][B] each. A weight step has no
    // message and no event.
    size_t *freed = (size_t *)malloc(2 * PORTS * B * sizeof *freed), *sent = freed + PORTS * B;
    for (size_t i = 0; i < count; i++) {
        PipelineStep step = steps[i];
        int from, to, port = machine_port(mc, step);
        int receive = STREAM_RECEIVE + 2 * port, send = STREAM_SEND + 2 * port;
        pipeline_neighbours(mc->lists, stage, step, &from, &to);
        size_t read = from == PIPELINE_NONE ? 0 : received[port]++;
        size_t made = to == PIPELINE_NONE ? 0 : sends[port]++;
        unsigned in = (unsigned)(port * B + read % B), out = (unsigned)(port * B + made % B);
        StreamOp op = {step, OP_COMPUTE, step.kind == last_use, {-1, -1}, {0, 0}, 0,
                       in,   out,        (unsigned)slot[i],     0,        0};
        if (from != PIPELINE_NONE) {
            StreamOp r = {step, OP_RECEIVE, false, {-1, -1}, {0, 0}, from, in, 0, 0, 0, 0};
            op_wait(mc, &r, WAIT_FREE, STREAM_COMPUTE, freed[in], read >= B);
            size_t arrived = machine_enqueue(mc, stage, receive, r);
            op_wait(mc, &op, WAIT_INPUT, receive, arrived, true);
        }
        if (to != PIPELINE_NONE) op_wait(mc, &op, WAIT_SENT, send, sent[out], made >= B);
        size_t computed = machine_enqueue(mc, stage, STREAM_COMPUTE, op);
        if (from != PIPELINE_NONE) freed[in] = computed;
        if (to != PIPELINE_NONE) {
            StreamOp s = {step, OP_SEND, false, {-1, -1}, {0, 0}, to, out, 0, 0, 0, 0};
            op_wait(mc, &s, WAIT_COMPUTED, STREAM_COMPUTE, computed, true);
            sent[out] = machine_enqueue(mc, stage, send, s);
        }
    }
    free(freed);
}

// Returns the name of a message: kind, micro-batch and the global chunk that reads it.
static inline int machine_name(const Machine *mc, StepKind kind, int micro, int global_chunk) {
    return (micro * (mc->p * mc->v + 2) + global_chunk + 1) * 2 + kind;
}

static inline bool machine_ready(const Machine *mc, int stage, const StreamOp *op, double *time) {
    for (int w = 0; w < 2; w++) {
        if (op->waits[w] < 0) continue;
        const Stream *other = &mc->streams[stage * STREAM_COUNT + op->waits[w]];
        if (other->next <= op->wait_index[w]) return false;
        if (other->ops[op->wait_index[w]].end > *time) *time = other->ops[op->wait_index[w]].end;
    }
    return true;
}

static inline void machine_finish(Stream *stream, double start, double end) {
    stream->ops[stream->next].start = start;
    stream->ops[stream->next].end = end;
    stream->next++;
    stream->clock = end;
}

static inline void machine_compute(Machine *mc, int stage, const StreamOp *op) {
    size_t ends = PORTS * mc->buffers;
    PipelineStep step = op->step;
    int from, to;
    pipeline_neighbours(mc->lists, stage, step, &from, &to);
    int chunk = pipeline_chunk(mc->lists, stage, step.chunk);
    int *slot = &mc->slot_name[stage * mc->slots + op->slot];
    int own = machine_name(mc, STEP_FORWARD, step.micro, chunk);
    if (from != PIPELINE_NONE &&
        mc->receive_name[stage * ends + op->in] != machine_name(mc, step.kind, step.micro, chunk))
        mc->wrong++;
    // The slot is free (0), holds the forward's activations (its name), or a backward's for the
    // weight step (-name)
    int expected = step.kind == STEP_FORWARD ? 0 : step.kind == STEP_BACKWARD ? own : -own;
    if (*slot != expected) mc->wrong++;
    *slot = op->last_use ? 0 : step.kind == STEP_FORWARD ? own : -own;
    if (to != PIPELINE_NONE)
        mc->send_name[stage * ends + op->out] =
            machine_name(mc, step.kind, step.micro, chunk + (step.kind == STEP_FORWARD ? 1 : -1));
}

// Runs the operation at the head of a stream if it can. A message runs from its receiving end,
// when both ends are ready. The sender's head must be a send to this stage, on the stream of the
// same link.
static inline bool machine_advance(Machine *mc, int stage, int stream_index) {
    Stream *stream = &mc->streams[stage * STREAM_COUNT + stream_index];
    if (stream->next == stream->count) return false;
    StreamOp *op = &stream->ops[stream->next];
    double time = stream->clock;
    if (op->type == OP_SEND || !machine_ready(mc, stage, op, &time)) return false;
    if (op->type == OP_COMPUTE) {
        double cost = mc->cost[op->step.kind];
        if (op->step.kind == STEP_BACKWARD && op->last_use)
            cost += mc->cost[STEP_WEIGHT];  // it does both halves
        if (mc->scale) cost *= mc->scale[pipeline_chunk(mc->lists, stage, op->step.chunk)];
        machine_compute(mc, stage, op);
        machine_finish(stream, time, time + cost);
        mc->busy += cost;
        if (time + cost > mc->makespan) mc->makespan = time + cost;
        return true;
    }
    int sends = STREAM_SEND + 2 * machine_port(mc, op->step);
    Stream *from = machine_stream(mc, op->peer, sends);
    if (from->next == from->count) return false;
    StreamOp *send = &from->ops[from->next];
    double send_time = from->clock;
    if (send->type != OP_SEND || send->peer != stage ||
        !machine_ready(mc, op->peer, send, &send_time))
        return false;
    if (send_time > time) time = send_time;
    mc->receive_name[stage * PORTS * mc->buffers + op->in] =
        mc->send_name[op->peer * PORTS * mc->buffers + send->in];
    machine_finish(stream, time, time + mc->transfer);
    machine_finish(from, time, time + mc->transfer);
    return true;
}

// Runs p lists on the machine. Release with machine_free (also before another run with the same
// Machine).
static inline void machine_run(Machine *mc, const PipelineLists *l) {
    size_t per_stage = (size_t)mc->m * mc->v, ends = PORTS * mc->buffers;
    mc->lists = l;
    mc->streams = (Stream *)calloc((size_t)mc->p * STREAM_COUNT, sizeof *mc->streams);
    mc->wrong = mc->slots = 0;
    mc->makespan = mc->busy = 0;
    size_t *slot = (size_t *)malloc(3 * per_stage * sizeof *slot);
    for (int s = 0; s < mc->p; s++) {
        size_t room[STREAM_COUNT] = {0};
        for (int role = 0; role < STREAM_COUNT; role++)
            room[mc->stream_of[role]] += role == STREAM_COMPUTE ? 3 * per_stage : per_stage;
        for (int i = 0; i < STREAM_COUNT; i++)
            mc->streams[s * STREAM_COUNT + i].ops =
                (StreamOp *)malloc((room[i] + 1) * sizeof(StreamOp));
        size_t slots = pipeline_slots(l, s, slot);
        if (slots > mc->slots) mc->slots = slots;
        machine_enqueue_stage(mc, s, l->steps[s], slot, l->counts[s]);
    }
    free(slot);
    mc->receive_name = (int *)calloc((size_t)mc->p * (2 * ends + mc->slots), sizeof(int));
    mc->send_name = mc->receive_name + mc->p * ends;
    mc->slot_name = mc->send_name + mc->p * ends;
    int n = mc->p * STREAM_COUNT;
    uint64_t random = mc->order;
    for (bool moved = true; moved;) {
        moved = false;
        // At random first, then everything once in turn, so that the end is noticed
        for (int burst = 0; mc->order && burst < n; burst++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            int pick = (int)((random >> 33) % (uint64_t)n);
            machine_advance(mc, pick / STREAM_COUNT, pick % STREAM_COUNT);
        }
        for (int i = 0; i < n; i++) {
            if (mc->streams[i].only_sends) continue;
            bool more = true;
            while (more && machine_advance(mc, i / STREAM_COUNT, i % STREAM_COUNT)) {
                moved = true;
                more = !mc->order;
            }
        }
    }
    mc->complete = true;
    for (int i = 0; i < n; i++)
        mc->complete = mc->complete && mc->streams[i].next == mc->streams[i].count;
}

static inline void machine_free(Machine *mc) {
    for (int i = 0; i < mc->p * STREAM_COUNT; i++) free(mc->streams[i].ops);
    free(mc->streams);
    free(mc->receive_name);
}

#endif
