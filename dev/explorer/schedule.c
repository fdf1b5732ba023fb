// schedule.c: the pages' schedules and collectives, from the headers that the trainers and
// build/tools/schedule use: lists, proof, and the walk that times them. A list without a proof
// runs on the small machine of streams, which shows the waits.
#include "libc.h"
#define LLMC_FILE_H  // lists come from the page, not from files
#include "llmc/host/error.h"
static char *file_read(const char *path, size_t most, size_t *bytes, Error *err);

#include "dev/plot/pipeline_pairs.h"
#include "dev/plot/pipeline_streams.h"
#include "llmc/mpi/types.h"
#include "llmc/v_schedules.h"

// A list by hand, whose chunks may lie in a V, has a number behind those of the schedules.
enum { TEXT_BYTES = 1 << 20, MOST_STEPS = 1 << 21, BY_HAND = SCHEDULE_COUNT, V_BY_HAND };
// From the page: a list by hand, a command line.
char schedule_text[TEXT_BYTES], command_text[TEXT_BYTES];

static char *file_read(const char *path, size_t most, size_t *bytes, Error *err) {
    (void)path, (void)most, (void)err;
    *bytes = strlen(schedule_text);
    return schedule_text;
}

// A step or a message as it ran. kind: StepKind; 3 a send, 4 a receipt.
typedef struct {
    double start, end;
    int kind, micro, chunk;
} Box;

// The operation of a stage that does not begin in a deadlock, and the stage for which it waits.
// type: OpType. `input` is true if a compute waits for its input, and false if it waits for a free
// buffer.
typedef struct {
    int type, kind, micro, chunk, peer, input;
} Stuck;

typedef struct {
    double p, m, v, split, makespan, busy, bubble, formula, proved_with, needs, limit, hangs;
    Box *boxes;
    int *first;      // [p + 1] boxes of each stage
    int *in_flight;  // [p] most activations at one time
    int *layers;     // [p * v] of each global chunk
    Stuck *stuck;    // [p] type -1: the stage is through
} Result;

static struct {
    PipelineLists lists;
    Result result;
} run;

static int refuse(const char *text) {
    snprintf(stderr_text, sizeof stderr_text, "%s", text);
    return 1;
}

// Makes the lists of a schedule that exists for these sizes. limit: of zb-auto. Not inlined twice,
// as the page is to be small.
__attribute__((noinline)) static PipelineLists lists_of(int kind, int p, int m, int v,
                                                        const PipelineTimes *times, size_t limit) {
    return kind >= SCHEDULE_ZB_V ? v_make((Schedule)kind, p, m, times)
                                 : zero_bubble_make((Schedule)kind, p, m, v, times, limit);
}

// Returns false, with a sentence, if a schedule does not exist for these sizes.
__attribute__((noinline)) static bool exists(int kind, int p, int m, int v, Error *err) {
    return kind >= SCHEDULE_ZB_V ? v_check((Schedule)kind, p, m, v, err)
                                 : pipeline_check((Schedule)kind, p, m, v, err);
}

// Makes the lists of a schedule by its name or by hand.
static bool make_lists(int kind, int p, int m, int v, const PipelineTimes *times, size_t limit,
                       Error *err) {
    PipelineLists *l = &run.lists;
    if (kind >= BY_HAND) {
        if (!pipeline_parse("the list", schedule_text, l, err)) return false;
        l->folded = kind == V_BY_HAND;
        return !l->folded || exists(SCHEDULE_ZB_V, l->p, l->m, l->v, err);
    }
    if (!exists(kind, p, m, v, err)) return false;
    if ((double)p * m * v > MOST_STEPS / 2)
        return error_set(
            err, "%d stages, %d micro-batches and %d chunks are too many for this page", p, m, v);
    *l = lists_of(kind, p, m, v, times, limit);
    return true;
}

// True if each list is in order by itself: then the machine can run it, whatever the stages do to
// each other.
static bool lists_in_order(const PipelineLists *l, Error *err) {
    if ((double)l->p * l->m * l->v > MOST_STEPS / 2)
        return error_set(err, "the list is too long for this page");
    for (int s = 0; s < l->p; s++)
        if (!pipeline_prove_list(l, s, err)) return false;
    return true;
}

// Returns the fewest buffers at each end of a link with which the lists cannot hang; 0: they hang
// with any number.
static size_t buffers_needed(const PipelineLists *l) {
    Error err;
    size_t most = (size_t)l->m * l->v;
    for (size_t buffers = 1; buffers < most && buffers <= 4; buffers++)
        if (pipeline_prove(l, buffers, &err)) return buffers;
    if (!pipeline_prove(l, most, &err)) return 0;
    size_t low = most < 4 ? most - 1 : 4, high = most;  // hangs with low, not with high
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (pipeline_prove(l, middle, &err)) high = middle;
        else low = middle;
    }
    return high;
}

// Returns the layers of a global chunk, of L, as pipeline_plan_layers deals them.
static size_t layers_of(const PipelineLists *l, size_t L, size_t chunk) {
    size_t p = (size_t)l->p, place = chunk / p * p + chunk_stage(p, l->folded, chunk);
    return stage_layer_count(L, p * (size_t)l->v, place);
}

// Returns [p * v] times of a chunk's steps relative to a chunk of average length, for L layers.
static double *chunk_scale(const PipelineLists *l, size_t L) {
    size_t chunks = (size_t)l->p * l->v;
    double *scale = host_alloc(chunks, sizeof *scale);
    for (size_t c = 0; c < chunks; c++)
        scale[c] = (double)layers_of(l, L, c) * (double)chunks / (double)L;
    return scale;
}

// Returns idle time over work of all stages.
static double bubble_of(int p, double makespan, double busy) { return makespan / (busy / p) - 1; }

// Returns the bubble of L layers with free messages, of lists that are proved, for layout.cu.
double lists_bubble(const PipelineLists *lists, const double *cost, size_t L) {
    const PipelineTimes times = {{cost[0], cost[1], cost[2]}, 0, chunk_scale(lists, L)};
    PipelineRun walked = {NULL, 0, 0, 0};
    Error err;
    if (!pipeline_walk(lists, PIPELINE_BUFFERS, &times, &walked, &err)) return __builtin_nan("");
    return bubble_of(lists->p, walked.end, walked.busy);
}

// Returns the operation that a stage is in and the stage for which it waits. Its compute stream
// waits for a message, whose stream waits for the other stage; with one stream the message itself
// is there.
static Stuck find_stuck(const Machine *mc, int stage) {
    Stuck stuck = {-1, 0, 0, 0, stage, 0};
    const Stream *streams = &mc->streams[stage * STREAM_COUNT];
    for (int i = 0; i < STREAM_COUNT; i++) {
        const Stream *stream = &streams[i];
        if (stream->next == stream->count) continue;
        const StreamOp *op = &stream->ops[stream->next];
        stuck.type = op->type;
        stuck.kind = op->step.kind;
        stuck.micro = op->step.micro;
        stuck.chunk = op->step.chunk;
        if (op->type != OP_COMPUTE) stuck.peer = op->peer;
        for (int w = 0; op->type == OP_COMPUTE && w < 2; w++) {
            if (op->waits[w] < 0) continue;
            const Stream *other = &streams[op->waits[w]];
            if (other->next > op->wait_index[w]) continue;
            stuck.peer = other->ops[op->wait_index[w]].peer;
            stuck.input = other->ops[op->wait_index[w]].type == OP_RECEIVE;
            break;
        }
        break;  // of the compute stream if it is not through: it is the first
    }
    return stuck;
}

// Copies the operations that ran, stage by stage; the computes of a stage in the order of time,
// then its messages if the page draws them.
static void copy_boxes(const Machine *mc, Result *r, bool with_messages) {
    size_t count = 0;
    for (int i = 0; i < mc->p * STREAM_COUNT; i++)
        if (with_messages || i % STREAM_COUNT == mc->stream_of[STREAM_COMPUTE])
            count += mc->streams[i].next;
    r->boxes = host_alloc(count, sizeof *r->boxes);
    r->first = host_alloc((size_t)mc->p + 1, sizeof *r->first);
    int n = 0;
    for (int s = 0; s < mc->p; s++) {
        r->first[s] = n;
        for (int messages = 0; messages <= with_messages; messages++)
            for (int i = 0; i < STREAM_COUNT; i++) {
                if (!messages && i != mc->stream_of[STREAM_COMPUTE]) continue;
                const Stream *stream = &mc->streams[s * STREAM_COUNT + i];
                for (size_t k = 0; k < stream->next; k++) {
                    const StreamOp *op = &stream->ops[k];
                    if ((op->type != OP_COMPUTE) != messages) continue;
                    Box box = {op->start, op->end, 0, op->step.micro, op->step.chunk};
                    box.kind = op->type == OP_COMPUTE ? (int)op->step.kind
                               : op->type == OP_SEND  ? 3
                                                      : 4;
                    r->boxes[n++] = box;
                }
            }
    }
    r->first[mc->p] = n;
}

// Adds the messages at both ends of a stage's links. A stage receives in the order in which its
// neighbour sends.
static void walk_messages(const PipelineLists *l, const PipelineRun *walked, int stage,
                          double transfer, Box *boxes, int *n) {
    for (int s = 0; s < l->p; s++) {
        bool near = s == stage || (s + 1) % l->p == stage || (stage + 1) % l->p == s;
        for (size_t i = 0; near && i < l->counts[s]; i++) {
            PipelineStep step = l->steps[s][i];
            int from, to;
            int reads = pipeline_chunk(l, s, step.chunk) +
                        (step.kind == STEP_FORWARD ? 1 : -1);  // global chunk
            double sent = walked->steps[s][i].sent;
            pipeline_neighbours(l, s, step, &from, &to);
            if (to == PIPELINE_NONE) continue;
            if (s == stage) boxes[(*n)++] = (Box){sent - transfer, sent, 3, step.micro, step.chunk};
            if (to == stage)
                boxes[(*n)++] = (Box){sent - transfer, sent, 4, step.micro, reads / l->p};
        }
    }
}

// Times lists that are proved, by the walk that proves them, and copies their boxes.
static void run_walk(const PipelineLists *l, const PipelineTimes *times, size_t buffers, Result *r,
                     bool with_messages) {
    PipelineRun walked = {host_alloc((size_t)l->p, sizeof *walked.steps), 0, 0, 0};
    Error err;
    size_t count = 0;
    for (int s = 0; s < l->p; s++) {
        walked.steps[s] = host_alloc(l->counts[s], sizeof **walked.steps);
        count += l->counts[s];
    }
    pipeline_walk(l, buffers, times, &walked, &err);
    r->makespan = walked.end;
    r->busy = walked.busy;
    r->boxes = host_alloc(with_messages ? 3 * count : count, sizeof *r->boxes);
    r->first = host_alloc((size_t)l->p + 1, sizeof *r->first);
    int n = 0;
    for (int s = 0; s < l->p; s++) {
        r->first[s] = n;
        for (size_t i = 0; i < l->counts[s]; i++) {
            PipelineStep step = l->steps[s][i];
            PipelineTime time = walked.steps[s][i];
            r->boxes[n++] = (Box){time.start, time.end, (int)step.kind, step.micro, step.chunk};
        }
        if (with_messages) walk_messages(l, &walked, s, times->transfer, r->boxes, &n);
    }
    r->first[l->p] = n;
}

// Runs lists on the machine, which may hang, and copies their boxes and the operations that do
// not begin.
static void run_machine(const PipelineLists *l, const PipelineTimes *times, size_t buffers,
                        bool one_stream, Result *r, bool with_messages) {
    Machine mc = {.p = l->p, .m = l->m, .v = l->v, .buffers = buffers, .transfer = times->transfer,
                  .scale = times->scale};
    for (int role = 0; role < STREAM_COUNT; role++) mc.stream_of[role] = one_stream ? 0 : role;
    for (int kind = 0; kind < 3; kind++) mc.cost[kind] = times->step[kind];
    machine_run(&mc, l);
    r->makespan = mc.makespan;
    r->busy = mc.busy;
    r->hangs = !mc.complete;
    for (int s = 0; s < l->p; s++) r->stuck[s] = find_stuck(&mc, s);
    copy_boxes(&mc, r, with_messages);
}

// Returns the papers' bubble, idle over work, for chunks that all cost the same; NAN if there is
// no formula.
double schedule_formula(int kind, int p, int m, int v, double forward, double backward,
                        double weight) {
    double bubble = pipeline_bubble(p, m, v);
    if (kind == SCHEDULE_ZB_H1)
        return bubble * (forward + backward - weight) / (forward + backward + weight);
    return kind <= SCHEDULE_INTERLEAVED ? bubble : __builtin_nan("");
}

// Makes the lists, has them proved, runs them. The cost is for a step of a chunk of average
// length. A chunk with more layers costs more in proportion.
//   layers      0: all chunks are equal.
//   one_stream  Send, receive and compute share one stream.
//   lanes       The most stages for which the page draws messages.
// Returns 0; 1 if refused, with the sentence in stderr_text; 2 if it hangs, with the operations up
// to there. The result lives until the next run.
int schedule_run(int kind, int p, int m, int v, double forward, double backward, double weight,
                 double transfer, int layers, int limit, int buffers, int one_stream, int lanes) {
    Error err;
    Result *r = &run.result;
    const PipelineTimes times = {{forward, backward, weight}, transfer, NULL};
    size_t most = limit ? (size_t)limit : 2 * (size_t)p;
    static size_t start;
    if (!start) start = heap_mark();
    heap_reset(start);
    memset(&run, 0, sizeof run);
    stderr_text[0] = 0;
    if (buffers < 1) return refuse("a link needs 1 or more buffers at each end");
    if (!make_lists(kind, p, m, v, &times, most, &err)) return refuse(err.text);
    PipelineLists *l = &run.lists;
    p = l->p, m = l->m, v = l->v;
    if (layers && layers < p * v) {
        error_set(&err,
                  "%d layers do not fill %d stages * %d chunks: lower --pipeline or --virtual",
                  layers, p, v);
        return refuse(err.text);
    }
    size_t needs = buffers_needed(l);
    bool proved = (needs && (size_t)buffers >= needs) || pipeline_prove(l, (size_t)buffers, &err);
    if (!proved) refuse(err.text);
    if (!proved && (strncmp(err.text, "deadlock", 8) != 0 || !lists_in_order(l, &err))) return 1;
    r->layers = host_alloc((size_t)p * v, sizeof *r->layers);
    for (int c = 0; c < p * v && layers; c++)
        r->layers[c] = (int)layers_of(l, (size_t)layers, (size_t)c);
    double *scale = layers ? chunk_scale(l, (size_t)layers) : NULL;
    const PipelineTimes scaled = {{forward, backward, weight}, transfer, scale};
    bool with_messages = transfer > 0 && p <= lanes;
    r->stuck = host_alloc((size_t)p, sizeof *r->stuck);
    for (int s = 0; s < p; s++) r->stuck[s].type = -1, r->stuck[s].peer = s;
    if (proved && !one_stream) run_walk(l, &scaled, (size_t)buffers, r, with_messages);
    else run_machine(l, &scaled, (size_t)buffers, one_stream, r, with_messages);
    r->p = p, r->m = m, r->v = v;
    r->bubble = r->hangs ? __builtin_nan("") : bubble_of(p, r->makespan, r->busy);
    r->formula = schedule_formula(kind, p, m, v, forward, backward, weight);
    r->proved_with = proved ? buffers : 0;
    r->needs = (double)needs;
    r->limit = (double)most;
    r->in_flight = host_alloc((size_t)p, sizeof *r->in_flight);
    for (int s = 0; s < p; s++) {
        r->split = r->split || pipeline_last_use(l->steps[s], l->counts[s]) == STEP_WEIGHT;
        r->in_flight[s] = (int)pipeline_slots(l, s, NULL);
    }
    return r->hangs ? 2 : 0;
}

const Result *schedule_result(void) { return &run.result; }

// Writes one line of the list into schedule_text, as pipeline_parse reads it.
void schedule_list(int stage) {
    size_t at = 0;
    schedule_text[0] = 0;
    for (size_t i = 0; i < run.lists.counts[stage] && at + 32 < sizeof schedule_text; i++) {
        PipelineStep step = run.lists.steps[stage][i];
        at += (size_t)snprintf(schedule_text + at, 32, run.lists.v > 1 ? "%s%c%d.%d" : "%s%c%d",
                               i ? " " : "", "FBW"[step.kind], step.micro, step.chunk);
    }
}

// ---- all schedules beside each other ---------------------------------------------------

// Of one schedule: its step's time, work of all stages, messages, chunks a stage; then the most
// activations that each stage holds, in micro-batches.
enum { COMPARED = 4 };

static void compare(Schedule schedule, int p, int m, const PipelineTimes *stage, double pair,
                    double *out) {
    bool folded = schedule >= SCHEDULE_ZB_V;
    int v = folded || schedule == SCHEDULE_INTERLEAVED ? 2 : 1;
    PipelineTimes chunk = *stage;
    PipelineRun walked = {NULL, __builtin_nan(""), 0, 0};
    Error err;
    out[0] = walked.end;
    for (int kind = 0; kind < 3; kind++) chunk.step[kind] /= v;
    if (schedule == SCHEDULE_ZB_AUTO && !(stage->step[STEP_FORWARD] > 0)) return;
    if (!exists(schedule, p, m, v, &err)) return;
    PipelineLists l = lists_of(schedule, p, m, v, folded ? &chunk : stage, 2 * (size_t)p);
    if (!pipeline_prove(&l, PIPELINE_BUFFERS, &err)) return;
    if (schedule == SCHEDULE_DUALPIPE_V && pair > 0) pairs_walk(&l, &chunk, pair / v, &walked);
    else pipeline_walk(&l, PIPELINE_BUFFERS, &chunk, &walked, &err);
    out[0] = walked.end;
    out[1] = walked.busy;
    out[3] = v;
    for (int s = 0; s < p; s++) {
        out[COMPARED + s] = (double)pipeline_slots(&l, s, NULL) / v;
        for (size_t i = 0; i < l.counts[s]; i++) {
            int from, to;
            pipeline_neighbours(&l, s, l.steps[s][i], &from, &to);
            out[2] += from != PIPELINE_NONE;
        }
    }
    pipeline_lists_free(&l);
}

// Returns [SCHEDULE_COUNT][COMPARED + p] for times of a whole stage, which the chunks of a stage
// share. A schedule that does not exist for these sizes has the time NAN. pair: the time of an
// overlapped forward and backward, under dualpipe-v; 0: they do not overlap.
const double *compare_run(int p, int m, double forward, double backward, double weight,
                          double transfer, double pair) {
    const PipelineTimes stage = {{forward, backward, weight}, transfer, NULL};
    static size_t start;
    if (!start) start = heap_mark();
    heap_reset(start);
    size_t row = COMPARED + (size_t)p;
    double *rows = host_alloc(SCHEDULE_COUNT * row, sizeof *rows);
    for (int s = 0; s < SCHEDULE_COUNT; s++)
        compare((Schedule)s, p, m, &stage, pair, rows + s * row);
    return rows;
}

// ---- collectives -----------------------------------------------------------------------

// RING_WHOLE: the place of a message that carries all parts. The page's collectives are NCCL's
// first four, and two more.
enum { RING_MOST = 16, RING_WHOLE = RING_MOST, RING_NONE = -1 };
enum { RING_ALL_TO_ALL = NCCL_MPI_BROADCAST + 1, RING_TREE };

// The content of each part of each rank's buffer before and after every round. It is a set of the
// ranks whose contributions the part holds, one bit each. Each round also has the part that a rank
// sends, and the receiver.
typedef struct {
    double rounds, bytes_sent,
        counted_sent,  // of the busiest rank: added up over the rounds, and by ring_traffic
        bytes_all;
    int sets[2 * RING_MOST][RING_MOST][RING_MOST];
    int part[2 * RING_MOST][RING_MOST], to[2 * RING_MOST][RING_MOST];
} Ring;
static Ring ring;

// Returns the rank with which rank r of n exchanges in round k, or r if it rests. Each round of
// n - 1 pairs all ranks, or for an odd n each of n rounds all but one.
static int partner(int k, int r, int n) {
    int q = n % 2 ? n : n - 1;
    if (r == q) return k * (q + 1) / 2 % q;
    int other = (k - r + q) % q;
    return other == r && n % 2 == 0 ? q : other;
}

// Sets the part that rank r sends in round k, and its receiver. Returns true if the receiver adds
// it.
//   reduce-scatter  Part r - 1 - k, which it has just added to.
//   all-gather      Part r - k, which it has just got.
//   broadcast       Part k - r, as rank 0 starts one part after the other.
//   all-to-all      The part for its partner.
//   tree            Up to the rank that lies one bit lower, then down again.
static bool ring_message(int op, int k, int r, int n, int levels, int *part, int *to) {
    int half = n - 1;
    *part = RING_NONE;
    *to = (r + 1) % n;
    if (op == RING_TREE) {
        bool up = k < levels;
        int step = 1 << (up ? k : 2 * levels - 1 - k);
        *to = up ? r - step : r + step;
        if (r % (2 * step) == (up ? step : 0) && *to < n) *part = RING_WHOLE;
        return up;
    }
    if (op == RING_ALL_TO_ALL) {
        *to = partner(k, r, n);
        if (*to != r) *part = *to;
        return false;
    }
    if (op == NCCL_MPI_BROADCAST) {
        if (r < half && k >= r && k - r < n) *part = k - r;
        return false;
    }
    bool adds = op == NCCL_MPI_REDUCE_SCATTER || (op == NCCL_MPI_ALL_REDUCE && k < half);
    *part = ((adds ? r - 1 - k : r - k % half) + 2 * n) % n;
    return adds;
}

// Runs a collective. count: elements of the whole buffer of all n parts, a multiple of n.
const Ring *ring_run(int op, int n, double count, int width) {
    memset(&ring, 0, sizeof ring);
    size_t part_count = (size_t)count / (size_t)n;
    int half = n - 1, levels = 0;
    while (1 << levels < n) levels++;
    int rounds = op == RING_TREE         ? 2 * levels
                 : op == RING_ALL_TO_ALL ? n - 1 + n % 2
                 : op == NCCL_MPI_ALL_REDUCE || op == NCCL_MPI_BROADCAST ? 2 * half
                                                                         : half;
    for (int r = 0; r < n; r++) {
        for (int i = 0; i < n; i++) {
            bool has = op == NCCL_MPI_ALL_GATHER ? i == r : op != NCCL_MPI_BROADCAST || r == 0;
            ring.sets[0][r][i] = has ? 1 << r : 0;
        }
    }
    ring.rounds = rounds;
    double sent[RING_MOST] = {0};
    for (int k = 0; k < rounds; k++) {
        memcpy(ring.sets[k + 1], ring.sets[k], sizeof ring.sets[k]);
        for (int r = 0; r < n; r++) {
            int *part = &ring.part[k][r], *to = &ring.to[k][r];
            bool adds = ring_message(op, k, r, n, levels, part, to);
            if (*part == RING_NONE) continue;
            bool whole = *part == RING_WHOLE;
            for (int i = whole ? 0 : *part; i < (whole ? n : *part + 1); i++) {
                int *place = &ring.sets[k + 1][*to][op == RING_ALL_TO_ALL ? r : i];
                *place = (adds ? *place : 0) | ring.sets[k][r][i];
            }
            double bytes = (double)part_count * width * (whole ? n : 1);
            sent[r] += bytes;
            ring.bytes_all += bytes;
        }
    }
    for (int r = 0; r < n; r++)
        if (sent[r] > ring.bytes_sent) ring.bytes_sent = sent[r];
    NcclMpiCounter c = {0, 0, 0};
    bool scattered = op == NCCL_MPI_REDUCE_SCATTER || op == NCCL_MPI_ALL_GATHER;
    size_t argument = part_count * (size_t)(scattered ? 1 : n);
    if (op == RING_ALL_TO_ALL) {
        for (int to = 1; to < n; to++)
            ring_traffic(&c, NCCL_MPI_SEND, part_count, (size_t)width, 2, 0, 1);
    } else {  // a tree is counted as a ring, too
        ring_traffic(&c, op == RING_TREE ? NCCL_MPI_ALL_REDUCE : (NcclMpiOp)op, argument,
                     (size_t)width, (size_t)n, 0, 0);
    }
    ring.counted_sent = (double)c.bytes_sent;
    return &ring;
}
