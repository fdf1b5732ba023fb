// test_parallel.c: tests the behaviour of several ranks beyond right numbers, which test_gpt.c
// checks. They resume each other's checkpoints and keep their replicas equal. They send as many
// bytes and hold as many as the papers say. They survive any order of streams and messages, and
// refuse bad input together.
//
//   test_parallel BUILD_DIR [GROUP]      for example: test_parallel build/cpu-fp32 traffic
//
// Run it in the root of the repository. The groups are listed above main. A check that guards
// against a known bug of this field names it in quotation marks.
#define _GNU_SOURCE
#include "dev/test/check_trace.h"
#include "dev/test/compare_runs.h"

// A grid of t x d x p ranks with v chunks a stage. Its flags are --tensor and so on, and `flags`.
typedef struct {
    const char *trainer;  // what follows "train_gpt", or a lesson's name, which follows "train_"
    int t, d, p, v;
    const char *flags;
    bool bf16;  // in bf16 too
} Grid;

typedef struct {
    char trainer[32], flags[256], name[128];
    Layout layout;
} Started;

// Returns the layout that starts the grid. s must outlive it.
static const Layout *start_of(const Grid *g, Started *s) {
    bool tp = *g->trainer, pp = tp && strcmp(g->trainer, "_tp") != 0,
         dp = pp && strcmp(g->trainer, "_pp") != 0;
    bool alone = is_data_lesson(g->trainer);
    char t[32], p[32], v[32], d[32];
    snprintf(t, sizeof t, " --tensor %d", g->t);
    snprintf(p, sizeof p, " --pipeline %d", g->p);
    snprintf(v, sizeof v, " --virtual %d", g->v);
    snprintf(d, sizeof d, " --data %d", g->d);
    trainer_program(s->trainer, sizeof s->trainer, g->trainer);
    snprintf(s->flags, sizeof s->flags, "%s%s%s%s%s", g->flags, tp && !alone ? t : "",
             pp && !alone ? p : "", g->v > 1 ? v : "", dp ? d : "");
    snprintf(s->name, sizeof s->name, "%s %dx%dx%d%s%s%s",
             tp ? g->trainer + (*g->trainer == '_') : "gpt", g->t, g->d, g->p, g->v > 1 ? v : "",
             *g->flags ? " " : "", g->flags);
    s->layout.trainer = s->trainer;
    s->layout.ranks = g->t * g->d * g->p;
    s->layout.flags = s->flags;
    return &s->layout;
}

static bool has(const Grid *g, const char *flag) { return strstr(g->flags, flag) != NULL; }
static bool sequence_parallel(const Grid *g) { return g->t > 1 && has(g, "--sequence-parallel 1"); }
static bool skipped(const Context *x, const Grid *g) {
    bool built = !x->sanitized || strcmp(g->trainer, "_3d") == 0;  // by dev/test/run_tests.sh
    return !built || g->t * g->d * g->p > max_ranks(x) || (x->bf16 && !g->bf16);
}

// ---- group checkpoints: written by one layout, resumed by another ----------------------

static const Grid PLACES[] = {
    {"", 1, 1, 1, 1, "", true},
    {"_tp", 4, 1, 1, 1, "", true},
    {"_tp", 2, 1, 1, 1, "--sequence-parallel 1", false},
    {"_pp", 1, 1, 4, 1, "", false},
    {"_3d", 1, 4, 1, 1, "", true},
    {"_pp", 2, 1, 2, 2, "", false},
    {"_3d", 1, 2, 3, 1, "--zero 0", false},
    {"_3d", 2, 2, 2, 2, "--sequence-parallel 1", true},
    {"_3d", 4, 2, 1, 1, "--zero 0", false},
    {"data", 1, 4, 1, 1, "", true},
    {"fsdp", 1, 4, 1, 1, "", true},
    {"fsdp", 1, 2, 1, 1, "--shard 2", false},
    {"fsdp", 1, 4, 1, 1, "--replicas 2", false},
    {"context", 1, 4, 1, 1, "--context 2", true},
    {"context", 1, 4, 1, 1, "--context 4 --context-by ring", false},
    {"_3d", 1, 2, 3, 1, "--layers-per-stage 1,2,1", false},
    {"v", 2, 1, 2, 1, "--schedule v-half", true},
};
enum { NUM_PLACES = sizeof PLACES / sizeof *PLACES };

// Pairs (writer, reader) in PLACES; every place also resumes itself.
static const int MOVES[][2] = {{1, 0}, {1, 2}, {2, 3}, {3, 4}, {4, 5}, {5, 6}, {6, 7}, {7, 8},
                               {8, 0}, {7, 0}, {0, 7}, {4, 1}, {7, 4}, {7, 9}, {9, 4}, {9, 0},
                               {4, 10}, {10, 7}, {10, 11}, {11, 0}, {10, 12}, {12, 10}, {12, 13},
                               {13, 0}, {6, 14}, {14, 7}, {7, 15}, {15, 3}, {15, 0}};

// Four steps over a shuffled epoch, with the states after steps 2 and 4.
static const char FOUR_STEPS[] =
    "--train-data golden/train.bin --shuffle 1 --seq 24 --global-batch 8 "
    "--micro-batch 1 --steps 4 --lr 0.003 --warmup 2 --val-every 0 "
    "--save-every 2 --keep 0 --log log";

// Returns the error of a folder's weights and optimizer against one rank's, as a share of the
// allowed error. That is twice the bounds of the worst tensor and of all together, because both
// sides may be off by the bound. Names the furthest tensor.
static double checkpoint_error(const Context *x, const char *folder, const char *base,
                               const char **what) {
    const ParamTable *table = &x->golden.table;
    static const char *const SUFFIXES[] = {"", ".m", ".v", ".master"};
    double *want = allocate(table->total * sizeof(double)), worst = 0;
    char path[128];
    for (int i = 0; i < (x->bf16 ? 4 : 3); i++) {
        const char *file = i == 0 ? "model" : "optimizer";
        snprintf(path, sizeof path, "%s/%s.safetensors", base, file);
        bool read = read_tensors(path, SUFFIXES[i], table, want);
        snprintf(path, sizeof path, "%s/%s.safetensors", folder, file);
        Errors e = state_errors(table, path, SUFFIXES[i], want);
        // The moments follow the gradients and have their bound, the second moment, a square,
        // twice that.
        Bounds b = bounds(x, &table->config);
        double worst_bound = i == 1 ? b.gradient : i == 2 ? 2 * b.gradient : b.weight;
        double whole_bound = i == 1 ? b.gradients : i == 2 ? 2 * b.gradients : b.weights;
        double share = read ? fmax(e.worst / (2 * worst_bound), e.whole / (2 * whole_bound))
                            : INFINITY;
        if (share >= worst) {
            worst = share;
            *what = i == 0 ? "weights" : SUFFIXES[i] + 1;
        }
    }
    free(want);
    return worst;
}

static void group_checkpoints(Context *x) {
    Started s, to;
    Log logs[NUM_PLACES];
    char from[64], base[] = "place-0/step-00000004";
    const char *what = "nothing";
    double bound = bounds(x, &x->golden.config).loss;
    for (int i = 0; i < NUM_PLACES; i++) {
        if (skipped(x, &PLACES[i])) continue;
        const Layout *layout = start_of(&PLACES[i], &s);
        remove("log");
        bool ok = runs(x, layout, "", "--init golden --out place-%d %s", i, FOUR_STEPS);
        logs[i] = read_log("log");
        snprintf(from, sizeof from, "place-%d/step-00000004", i);
        double error = checkpoint_error(x, from, base, &what), loss = 0;
        for (size_t k = 0; k < 4; k++)
            loss = fmax(loss, relative(logs[i].loss[k], logs[0].loss[k]));
        check(&x->check, ok && error <= 1,
              "%s: the checkpoint is that of one rank, %.3f of the bound (%s), "
              "\"tied embedding forgotten\"",
              s.name, error, what);
        check(&x->check, ok && loss <= bound && logs[i].steps == 4,
              "%s: the curve is that of one rank, %.1e, \"seed + rank\"", s.name, loss);

        ok = runs(x, layout, "", "--resume place-%d/step-00000002 --out again %s", i, FOUR_STEPS);
        Log log = read_log("log");
        check(&x->check,
              ok && same_log(&log, &logs[i]) && same_checkpoint("again/step-00000004", from),
              "%s: resumed by itself with the same bits, \"master weights\"", s.name);
        remove_tree("again");
    }
    for (size_t i = 0; i < sizeof MOVES / sizeof *MOVES; i++) {
        const Grid *a = &PLACES[MOVES[i][0]], *b = &PLACES[MOVES[i][1]];
        if (skipped(x, a) || skipped(x, b)) continue;
        start_of(a, &s);
        remove("log");
        bool ok = runs(x, start_of(b, &to), "", "--resume place-%d/step-00000002 --out moved %s",
                       MOVES[i][0], FOUR_STEPS);
        double error = checkpoint_error(x, "moved/step-00000004", base, &what);
        check(&x->check, ok && error <= 1,
              "%s -> %s: as if never moved, %.3f of the bound (%s), \"same topology only\"%s",
              s.name, to.name, error, what, a->t != b->t ? ", \"padding tied to t\"" : "");
        remove_tree("moved");
    }
    for (int i = 0; i < NUM_PLACES; i++) {
        snprintf(from, sizeof from, "place-%d", i);
        remove_tree(from);
    }
}

// ---- group replicas --------------------------------------------------------------------

// One number of the last rank's copy differs.
typedef struct {
    Grid grid;
    TensorKind kind;
    size_t layer;
    const char *says;
} StaleRow;

static const StaleRow STALE[] = {
    {{"_3d", 1, 2, 1, 1, "--zero 0", true},
     FCB,
     1,
     "h.1.mlp.c_fc.bias differs between the ranks"},
    {{"data", 1, 3, 1, 1, "--zero 0 --global-batch 6", false},
     LNFW,
     0,
     "ln_f.weight differs between the ranks"},
    {{"_pp", 1, 1, 2, 1, "", false}, WTE, 0, "wte.weight differs between the ranks"},
    {{"_tp", 2, 1, 1, 1, "--sequence-parallel 1", false},
     LN1W,
     2,
     "h.2.ln_1.weight differs between the ranks"},
    // ZeRO-1 gathers the owner's weights over a stale copy: it is seen before the first step, or
    // never.
    {{"data", 1, 4, 1, 1, "", false},
     PROJW,
     1,
     "h.1.attn.c_proj.weight differs between the ranks"},
};

static void check_stale_row(Context *x, const StaleRow *row) {
    Started s;
    Layout layout = *start_of(&row->grid, &s);
    Reference ref = reference_copy(&x->golden);
    write_model("model", &ref.table, ref.params, INTACT);
    ref.params[table_find(&ref.table, row->kind, row->layer)->offset + 7] += 0.001;
    if (mkdir("stale", 0777) && errno != EEXIST) die("cannot make", "stale");
    write_model("stale/model", &ref.table, ref.params, INTACT);
    reference_free(&ref);
    check_stale(x, s.name, layout, "", row->says);
}

static void group_replicas(Context *x) {
    static const Grid GRIDS[] = {
        {"_3d", 2, 2, 2, 2, "--sequence-parallel 1", true},
        {"_3d", 2, 2, 2, 1, "--sequence-parallel 1 --zero 0 --overlap 0", false},
        {"_tp", 4, 1, 1, 1, "--sequence-parallel 1", true},
        {"data", 1, 4, 1, 1, "", false},
        {"v", 2, 2, 2, 1, "--sequence-parallel 1", false},
        // The embeddings, ln_f, and what was gathered for the first two layers.
        {"fsdp", 1, 4, 1, 1, "", false},
        {"fsdp", 1, 4, 1, 1, "--replicas 2", true},
        {"context", 1, 4, 1, 1, "--context 2 --context-by ring", false},
    };
    size_t steps = x->sanitized ? 5 : 50;
    for (size_t i = 0; i < sizeof GRIDS / sizeof *GRIDS; i++) {
        Started s;
        if (skipped(x, &GRIDS[i])) continue;
        remove("log");
        bool ok =
            runs(x, start_of(&GRIDS[i], &s), "",
                 "--init golden --train-data golden/train.bin --seq 24 "
                 "--global-batch 8 --micro-batch 1 --steps %zu --lr 0.01 --val-every 0 --log log "
                 "--debug-replicas 1",
                 steps);
        Log log = read_log("log");
        check(&x->check, ok && log.steps == steps && log.loss[steps - 1] < log.loss[0],
              "%s: replicas are bit-equal after each of %zu steps, \"layernorm drift\", \"seed + "
              "rank\"",
              s.name, steps);
    }
    for (size_t i = 0; i < sizeof STALE / sizeof *STALE; i++) {
        if (!skipped(x, &STALE[i].grid)) check_stale_row(x, &STALE[i]);
    }
}

// ---- group sums: NCCL's orders of additions --------------------------------------------

// Properties that hold when a sum begins at another rank in every part of a buffer, as on NCCL's
// ring. They need d > 2: a + b is b + a, but sums of three differ. Rows behind a first one must
// have its bits.
typedef struct {
    Grid grid;
    const char *order;
    bool first;
} SumRow;

static const SumRow SUMS[] = {
    {{"_3d", 1, 4, 2, 1, "", true}, "ring:0", true},
    {{"_3d", 1, 4, 2, 1, "--zero 0 --overlap 0", false}, "ring:0", false},
    {{"zero_bubble", 1, 4, 2, 1, "--schedule 1f1b", false}, "ring:0", false},
    {{"_3d", 1, 4, 2, 1, "--zero 0", false}, "ring:1", true},
    {{"_3d", 2, 4, 1, 1, "--sequence-parallel 1", false}, "ring:1", true},
    {{"data", 1, 4, 1, 1, "--overlap 0", false}, "ring:1", true},
    {{"_3d", 1, 4, 1, 1, "", false}, "ring:1", false},
    // Each copy of wte has the sums of both stages.
    {{"_3d", 1, 4, 2, 1, "", false}, "any:2", true},
    {{"_3d", 1, 1, 2, 1, "", false}, "ring:0", true},
    {{"v", 1, 1, 2, 1, "--schedule zb-v", false}, "ring:0", false},
    {{"v", 1, 1, 2, 1, "--schedule v-half", false}, "ring:0", false},
    {{"v", 1, 1, 2, 1, "--schedule dualpipe-v", false}, "ring:0", false},
};

static void group_sums(Context *x) {
    if (on_gpu(x)) return;  // the order is the stand-in's
    Log base;
    memset(&base, 0, sizeof base);
    for (size_t i = 0; i < sizeof SUMS / sizeof *SUMS; i++) {
        const SumRow *row = &SUMS[i];
        Started s;
        char env[32];
        if (skipped(x, &row->grid)) continue;
        const Layout *layout = start_of(&row->grid, &s);
        const char *out = row->first ? "base" : "other";
        snprintf(env, sizeof env, "NCCL_ORDER=%s", row->order);
        remove_tree(out);
        remove("log");
        bool ok =
            runs(x, layout, env, "--init golden --debug-replicas 1 --out %s %s", out, FOUR_STEPS);
        Log log = read_log("log");
        check(&x->check, ok && log.steps == 4,
              "%s: replicas are bit-equal under NCCL_ORDER=%s, \"sums in another cut\"", s.name,
              row->order);
        if (row->first) {
            base = log;
            ok = runs(x, layout, env, "--resume base/step-00000002 --out again %s", FOUR_STEPS);
            log = read_log("log");
            ok = ok && same_checkpoint("again/step-00000004", "base/step-00000004");
            remove_tree("again");
        } else {
            ok = ok && same_checkpoint("other/step-00000004", "base/step-00000004");
        }
        check(&x->check, ok && same_log(&log, &base), "%s: %s under NCCL_ORDER=%s", s.name,
              row->first ? "resumed with the same bits" : "the bits of the row above", row->order);
    }
    // The t ranks that hold the same layernorm get its gradient from t communicators. It is
    // equal if these add in the same order.
    static const Layout TENSOR = {"train_gpt_3d", 8, "--tensor 2 --data 4"};
    if (x->bf16 || x->sanitized) return;
    Setting any = {"NCCL_ORDER=any:2", 0};
    check_refusal(x, &TENSOR, "replicas of 2 tensor ranks whose data ranks add in other orders",
                  any,
                  "--init golden --train-data golden/train.bin --seq 24 --global-batch 8 "
                  "--micro-batch 1 --steps 9 "
                  "--debug-replicas 1 --val-every 0",
                  1, "differs between the ranks that hold it");
}

// ---- group traffic: calls and bytes against the papers' formulas -----------------------

// The model that is counted: L layers, C channels; global batch G; two steps.
enum { TL = 4, TC = 32, TT = 24, TV = 61, TG = 8, TSTEPS = 2 };

typedef struct {
    Grid grid;
    int micro;
} TrafficRow;

static const TrafficRow TRAFFIC[] = {
    {{"_tp", 2, 1, 1, 1, "", true}, 1},
    {{"_tp", 4, 1, 1, 1, "", false}, 2},
    {{"_tp", 2, 1, 1, 1, "--recompute layer", false}, 2},
    {{"_tp", 4, 1, 1, 1, "--sequence-parallel 1", false}, 2},
    {{"_tp", 2, 1, 1, 1, "--sequence-parallel 1 --recompute layer", true}, 2},
    {{"_pp", 1, 1, 4, 1, "", true}, 1},
    {{"_pp", 1, 1, 2, 2, "", false}, 1},
    {{"_pp", 2, 1, 4, 1, "", false}, 1},
    {{"_pp", 4, 1, 2, 1, "--sequence-parallel 1", false}, 1},
    {{"_3d", 1, 2, 1, 1, "", true}, 1},
    {{"_3d", 1, 4, 1, 1, "--zero 0", true}, 1},
    {{"_3d", 1, 8, 1, 1, "", false}, 1},
    {{"data", 1, 4, 1, 1, "", true}, 1},
    {{"data", 1, 8, 1, 1, "--zero 0", false}, 1},
    {{"fsdp", 1, 2, 1, 1, "", true}, 4},
    {{"fsdp", 1, 2, 1, 1, "", false}, 1},
    {{"fsdp", 1, 4, 1, 1, "--shard 2 --recompute layer", false}, 1},
    {{"fsdp", 1, 8, 1, 1, "--overlap 0", false}, 1},
    {{"fsdp", 1, 4, 1, 1, "--replicas 2", true}, 1},
    {{"fsdp", 1, 4, 1, 1, "--shard 2 --replicas 4", false}, 2},
    {{"context", 1, 4, 1, 1, "--context 2", true}, 1},
    {{"context", 1, 4, 1, 1, "--context 4", false}, 2},
    {{"context", 1, 4, 1, 1, "--context 2 --context-by ring", true}, 1},
    {{"context", 1, 8, 1, 1, "--context 4 --context-by ring", false}, 1},
    {{"context", 1, 4, 1, 1, "--recompute rest --context 4 --context-by ring", false}, 1},
    {{"context", 1, 4, 1, 1, "--recompute layer --context 4 --context-by ring", false}, 1},
    {{"context", 1, 4, 1, 1, "--recompute rest --context 4", false}, 1},
    {{"context", 1, 4, 1, 1, "--recompute layer --context 4", false}, 1},
    {{"_3d", 2, 2, 2, 2, "", true}, 1},
    {{"_3d", 2, 2, 2, 2, "--sequence-parallel 1", false}, 1},
    {{"_3d", 2, 2, 2, 1, "--sequence-parallel 1 --zero 0 --overlap 0", false}, 2},
    {{"v", 1, 1, 2, 1, "--schedule zb-v", true}, 1},
    {{"v", 2, 1, 2, 1, "--schedule dualpipe-v --sequence-parallel 1 --recompute layer", false}, 1},
    {{"v", 2, 2, 2, 1, "--schedule v-half", false}, 1},
};

typedef struct {
    double calls, bytes;  // sent, over all ranks
} Traffic;

// Sums the lines that NCCL_TRAFFIC=1 made.
static Traffic traffic_of(const char *text, const char *comm, const char *op) {
    Traffic sum = {0, 0};
    char name[32], kind[32];
    for (const char *line = strstr(text, "traffic: "); line; line = strstr(line + 1, "traffic: ")) {
        unsigned long long calls, sent;
        int found = sscanf(line, "traffic: %31s rank %*d of %*d, %31[^:]: %llu calls, %llu", name,
                           kind, &calls, &sent);
        if (found != 4 || strcmp(name, comm) != 0 || strcmp(kind, op) != 0) continue;
        sum.calls += (double)calls;
        sum.bytes += (double)sent;
    }
    return sum;
}

// Adds the traffic of n operations of all ranks of a group of `size`, on `bytes` each.
static void add_all_reduces(Traffic *t, double n, double size, double bytes) {
    t->calls += n * size;
    t->bytes += n * 2 * (size - 1) * bytes;
}

// Half an all-reduce: reduce-scatter or all-gather of a whole buffer of `bytes`.
static void add_halves(Traffic *t, double n, double size, double bytes) {
    t->calls += n * size;
    t->bytes += n * (size - 1) * bytes;
}

enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, SEND, NUM_OPS };
enum { TENSOR, PIPELINE, DATA, EMBEDDING, WORLD, CONTEXT, REPLICAS, NUM_COMMS };
static const char *const OPS[NUM_OPS] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather",
                                         "ncclSend"};
static const char *const COMMS[NUM_COMMS] = {"tensor", "pipeline", "data",    "embedding",
                                             "world",  "context",  "replicas"};

typedef struct {
    Traffic by[NUM_COMMS][NUM_OPS];
    double layers;      // bytes on the tensor communicators for the layers alone
    double parameters;  // of all ranks together, padding included
} Counts;

static GPTConfig traffic_model(void) {
    GPTConfig g = {TL, TC, 4, TV, padded_vocabulary(TV), TT, NULL};
    return g;
}

// Returns how many copies of the model train_fsdp shards.
static int replicas_of(const Grid *g) {
    const char *flag = strstr(g->flags, "--replicas ");
    return flag ? atoi(flag + strlen("--replicas ")) : 1;
}

// Returns true for train_v: two chunks a stage, and the second ones come down again.
static bool is_v(const Grid *g) { return strcmp(g->trainer, "v") == 0; }

// Returns the table of tensor rank 0 on a stage; all tensor ranks have as many parameters. In a
// V the number of chunks divides the layers here.
static ParamTable stage_table(const GPTConfig *config, const Grid *g, int stage) {
    size_t layers[64], n = 0, p = (size_t)g->p, chunks = p * (is_v(g) ? 2 : (size_t)g->v);
    size_t first = 0;
    for (size_t chunk = 0; chunk < chunks; chunk++) {
        size_t count = config->L / chunks + (chunk < config->L % chunks);
        size_t its_stage = is_v(g) && chunk >= p ? 2 * p - 1 - chunk : chunk % p;
        for (size_t l = 0; l < count && its_stage == (size_t)stage; l++) layers[n++] = first + l;
        first += count;
    }
    bool shared = strcmp(g->trainer, "_3d") == 0 || is_v(g) || is_data_lesson(g->trainer);
    size_t align = shared ? TENSOR_ALIGN * (size_t)(g->d / replicas_of(g)) : 0;
    bool head = stage == (is_v(g) ? 0 : g->p - 1);
    Shard shard = {(size_t)g->t, 0, stage == 0, head, n, layers, align, 1, 0};
    return table_make(config, shard);
}

// Counts the sums of a bucket's gradients in train_fsdp, and the gathers of its weights, in all
// steps of m micro-batches. The layers' gradients are summed in each. Two of L layers have their
// weights, or all. They are the first ones after an update and after each backward, the last ones
// after each forward. The others are gathered again.
static void expected_sharding(const Grid *g, size_t bucket, double m, double *sums,
                              double *gathers) {
    size_t held = has(g, "--shard 2") ? TL : 2, l = bucket - BUCKET_LAYERS;
    bool layer = bucket >= BUCKET_LAYERS && l < TL;
    *sums = layer ? TSTEPS * m : TSTEPS;
    *gathers = !layer || l < held ? TSTEPS + 1 : 0;  // before the first step, too
    if (layer) *gathers += TSTEPS * m * ((l >= held) + (l < TL - held));
}

// Returns the number of parts of a sequence.
static int context_of(const Grid *g) {
    const char *flag = strstr(g->flags, "--context ");
    return flag ? atoi(flag + strlen("--context ")) : 1;
}

// Returns the messages of the ranks of a sequence, in `all` micro-batches of N tokens together.
//   Ulysses   four all-to-alls a layer: two of q, k and v or their gradients, two of the output
//             or its gradient.
//   Ring      keys and values c - 1 times forward and backward, their gradients in fp32 c times.
// Option --recompute layer sends forward's messages twice, and rest only its q, k and v.
static Traffic expected_context(const Grid *g, double all, double N, double w) {
    double c = context_of(g), layers = all * TL * c, part = N * TC / c;  // layers: of all ranks
    double whole = has(g, "--recompute layer"), qkv = has(g, "--recompute");
    Traffic t = {layers * (4 + qkv + whole) * (c - 1),
                 layers * (8 + 3 * qkv + whole) * part / c * (c - 1) * w};
    double rounds = 2 + whole;  // of keys
    if (has(g, "ring"))
        t.calls = layers * (rounds * (c - 1) + c),
        t.bytes = layers * 2 * part * (rounds * (c - 1) * w + c * 4);
    if (c == 1) t.calls = t.bytes = 0;
    return t;
}

// Returns the traffic of the formulas.
static Counts expected_traffic(const Grid *g, int micro, size_t width) {
    Counts c;
    memset(&c, 0, sizeof c);
    double t = g->t, d = g->d, w = (double)width, m = TG / (micro * d), N = micro * TT,
           X = N * TC * w;
    c.by[CONTEXT][SEND] = expected_context(g, TSTEPS * TG / micro, N, w);
    // A message for each step from chunk to chunk, but none at the turn of a V.
    double messages = 2 * (is_v(g) ? 2 * g->p - 2 : g->p * g->v - 1);
    double steps = TSTEPS, all = steps * d * m, L = TL;
    bool sp = sequence_parallel(g);
    double halves = is_v(g) ? 2 : 1, again = has(g, "--recompute") ? halves : 0;
    Traffic *tensor = c.by[TENSOR], layers[NUM_OPS];
    memset(layers, 0, sizeof layers);
    // Layers: g and f of both halves, forward and backward, are 4 all-reduces. Recomputation of
    // forward adds one g. Under sequence parallelism each is a reduce-scatter and an all-gather.
    // Then backward also gathers the layernorms' outputs again, twice a layer, as each rank keeps
    // only its rows of them. A split backward recomputes in both halves, and the second one
    // gathers g's gradients again.
    if (!sp) {
        add_all_reduces(&layers[ALL_REDUCE], all * L * (4 + again), t, X);
    } else {
        add_halves(&layers[REDUCE_SCATTER], all * L * (4 + again), t, X);
        add_halves(&layers[ALL_GATHER], all * L * (4 + 2 * halves + 2 * again), t, X);
    }
    for (int op = 0; op < NUM_OPS; op++) {
        c.layers += layers[op].bytes;
        tensor[op] = layers[op];
    }
    // Embedding and head: one pair of g and f. The loss: the maximum, then sum and target of each
    // token.
    if (!sp) {
        add_all_reduces(&tensor[ALL_REDUCE], all * 2, t, X);
    } else {
        add_halves(&tensor[REDUCE_SCATTER], all * 2, t, X);
        add_halves(&tensor[ALL_GATHER], all * 2, t, X);
        // The last term has the gradients of layernorms.
        add_all_reduces(&tensor[ALL_REDUCE], steps * d * (4 * L + 2), t, TC * 4);
    }
    add_all_reduces(&tensor[ALL_REDUCE], all, t, N * 4);
    add_all_reduces(&tensor[ALL_REDUCE], all, t, 2 * N * 4);
    if (is_data_lesson(g->trainer))
        memset(tensor, 0, sizeof c.by[TENSOR]);  // it has no such communicator
    // A message is sent in t parts. The receivers gather them, but not under sequence
    // parallelism.
    c.by[PIPELINE][SEND].calls = all * messages * t;
    c.by[PIPELINE][SEND].bytes = all * messages * X;
    if (t > 1 && !sp) add_halves(&tensor[ALL_GATHER], all * messages, t, X);
    GPTConfig config = traffic_model();
    // Gradients in fp32 are reduce-scattered; then weights are gathered, or gradients without
    // ZeRO.
    for (int stage = 0; stage < g->p; stage++) {
        ParamTable table = stage_table(&config, g, stage);
        double after = has(g, "--zero 0") ? 4 : w;
        c.parameters += t * d * (double)table.total;
        // The two stages sum the tied embedding, bucket 0. With ZeRO each data rank sums its own
        // part. In a V stage 0 has both ends.
        double tied = (double)table.buckets[1] * 4 / (has(g, "--zero 0") ? 1 : d);
        if (g->p > 1 && stage == 0 && !is_v(g))
            add_all_reduces(&c.by[EMBEDDING][ALL_REDUCE], steps * t * d, 2, tied);
        for (size_t b = 0; b < table.bucket_count && d > 1; b++) {
            double size = (double)(table.buckets[b + 1] - table.buckets[b]);
            if (size == 0) continue;
            double sums = steps, gathers = steps;
            if (strcmp(g->trainer, "fsdp") == 0) expected_sharding(g, b, m, &sums, &gathers);
            // Replicas of the model have a group each, and each rank sums its shard over them.
            double r = replicas_of(g), shards = d / r;
            if (shards > 1) {
                add_halves(&c.by[DATA][REDUCE_SCATTER], sums * t * r, shards, size * 4);
                add_halves(&c.by[DATA][ALL_GATHER], gathers * t * r, shards, size * after);
            }
            if (r > 1)
                add_all_reduces(&c.by[REPLICAS][ALL_REDUCE], steps * shards, r, size / shards * 4);
        }
        table_free(&table);
    }
    // The squared norm of each tensor, the loss, and the numbers of ranks without data or with
    // a signal.
    double world = t * d * g->p;
    add_all_reduces(&c.by[WORLD][ALL_REDUCE], steps, world,
                    (double)(count_tensors(&config) + 3) * 8);
    return c;
}

// Prints one line of the table: bytes per rank by the papers' formulas, and the measured
// ones.
static void print_traffic(const Grid *g, int micro, size_t width, const char *name,
                          const Counts *want, const Counts *got) {
    double ranks = g->t * g->d * g->p, m = TG / (micro * g->d),
           bsh = micro * TT * TC * (double)width;
    double stated = 0, tensor = 0, messages = want->by[PIPELINE][SEND].calls,
           P = want->parameters / ranks;
    for (int op = 0; op < NUM_OPS; op++) {
        tensor += got->by[TENSOR][op].bytes;
        stated += want->by[TENSOR][op].bytes;
    }
    tensor = (tensor - stated + want->layers) / (TSTEPS * g->d * m * TL * g->t);
    double data = got->by[DATA][REDUCE_SCATTER].bytes + got->by[DATA][ALL_GATHER].bytes,
           w = (double)width;
    double each = 4 + (has(g, "--zero 0") ? 4 : w);  // bytes a parameter
    double shards = (double)g->d / replicas_of(g);
    if (strcmp(g->trainer, "fsdp") == 0) each = has(g, "--shard 2") ? 4 * m + w : m * (4 + 2 * w);
    printf("     %-52s %8.0f %8.0f  %8.0f %8.0f  %8.0f %8.0f\n", name,
           8 * bsh * (g->t - 1) / g->t, tensor, messages > 0 ? bsh / g->t : 0,
           messages > 0 ? got->by[PIPELINE][SEND].bytes / messages : 0,
           (shards - 1) / shards * P * each, data / ranks / TSTEPS);
}

// Checks the calls of a tensor rank in forward and in backward. Validation, which is forward
// alone, tells them apart.
static void check_forward_and_backward(Context *x) {
    static const Layout TWO = {"train_gpt_tp", 2, "--tensor 2"};
    static const char FLAGS[] =
        "--layers 4 --heads 4 --channels 32 --vocab 61 --seq 24 --global-batch 8 "
        "--micro-batch 1 --steps 1 --train-data golden/train.bin";
    Setting count = {"NCCL_TRAFFIC=1", 0};
    Outcome o = run(x->build, &TWO, count, "%s --val-every 0", FLAGS);
    Traffic training = traffic_of(o.err, "tensor", OPS[ALL_REDUCE]);
    bool ok = succeeded(&o);
    o = run(x->build, &TWO, count, "%s --val-every 1 --val-batches 1 --val-data golden/train.bin",
            FLAGS);
    Traffic both = traffic_of(o.err, "tensor", OPS[ALL_REDUCE]);
    ok = succeeded(&o) && ok;
    // Two validations, before and after the step, of as many micro-batches; two all-reduces are
    // the loss's.
    double forward = (both.calls - training.calls) / (2 * 2 * 8) - 2;
    double backward = training.calls / (2 * 8) - 2 - forward;
    check(&x->check, ok && forward == 2 * 4 + 1 && backward == 2 * 4 + 1,
          "a micro-batch takes 2 all-reduces a layer and 1 for the embedding forward (%g in "
          "all), 2 a layer "
          "and 1 for the head backward (%g)",
          forward, backward);
}

static void group_traffic(Context *x) {
    if (on_gpu(x) && max_ranks(x) == 1) return;
    size_t width = x->bf16 ? 2 : 4;
    Setting count = {"NCCL_TRAFFIC=1", 0};
    check_forward_and_backward(x);
    printf(
        "     Bytes that a rank sends: tensor per layer and micro-batch, pipeline per message, "
        "data per "
        "step.\n     Beyond the tensor formula: recomputing a layer sums once more (x 5/4); "
        "under "
        "sequence parallelism\n     backward gathers the layernorms' outputs again (x 5/4, and "
        "recomputed "
        "x 13/8).\n");
    printf("     %-52s %17s  %17s  %17s\n     %-52s %8s %8s  %8s %8s  %8s %8s\n", "",
           "8bsh(t-1)/t", "bsh/t", "2(d-1)/d P", "t x d x p", "formula", "measured", "formula",
           "measured", "formula", "measured");
    for (size_t i = 0; i < sizeof TRAFFIC / sizeof *TRAFFIC; i++) {
        const Grid *g = &TRAFFIC[i].grid;
        Started s;
        if (skipped(x, g)) continue;
        Outcome o =
            run(x->build, start_of(g, &s), count,
                "--layers %d --heads 4 --channels %d --vocab %d --seq %d --global-batch %d "
                "--micro-batch %d --steps %d --train-data golden/train.bin --val-every 0",
                TL, TC, TV, TT, TG, TRAFFIC[i].micro, TSTEPS);
        Counts want = expected_traffic(g, TRAFFIC[i].micro, width), got;
        char wrong[256] = "";
        memset(&got, 0, sizeof got);
        for (int comm = 0; comm < NUM_COMMS; comm++) {
            for (int op = 0; op < NUM_OPS; op++) {
                Traffic *a = &want.by[comm][op], *b = &got.by[comm][op];
                *b = traffic_of(o.err, COMMS[comm], OPS[op]);
                if (a->bytes + b->bytes == 0 || (a->calls == b->calls && a->bytes == b->bytes))
                    continue;
                snprintf(wrong, sizeof wrong, ": %s %s: %.0f calls, %.0f bytes, not %.0f, %.0f",
                         COMMS[comm], OPS[op], b->calls, b->bytes, a->calls, a->bytes);
            }
        }
        print_traffic(g, TRAFFIC[i].micro, width, s.name, &want, &got);
        check(&x->check, succeeded(&o) && !*wrong, "%s: calls and bytes, \"counts in bytes\"%s",
              s.name, wrong);
    }
}

// ---- group memory: the counts of --dry-run ---------------------------------------------

typedef struct {
    double weights, gradients, optimizer, activations;  // MiB of rank 0
} Memory;

static double mebibytes(const char *text, const char *what) {
    char line[32];
    double value = NAN;
    snprintf(line, sizeof line, "\n%s ", what);
    const char *at = strstr(text, line);
    return at && sscanf(at + strlen(line), "%lf", &value) == 1 ? value : NAN;
}

#define LARGE "--heads 16 --channels 1024 --vocab 50257 --seq 512 "

// Returns the memory that --dry-run prints, even if this machine has too little.
static Memory dry_run(Context *x, const Grid *g, const char *model) {
    Started s;
    Outcome o = run(x->build, start_of(g, &s), PLAIN, "%s --dry-run", model);
    Memory m = {mebibytes(o.out, "weights"), mebibytes(o.out, "gradients"),
                mebibytes(o.out, "optimizer"), mebibytes(o.out, "activations")};
    if (isnan(m.activations)) printf("     exit code %d: %.600s\n", o.code, o.err);
    outcome_free(&o);
    return m;
}

static bool near(double a, double b, double slack) { return fabs(a - b) <= slack; }

// Returns the elements on rank 0 by the table: split tensors fall as 1/t, replicated ones do not.
static double rank_elements(const Grid *g, const GPTConfig *config, double *replicated) {
    ParamTable table = stage_table(config, g, 0);
    double total = (double)table.total;
    for (size_t i = 0; i < table.count && replicated; i++) {
        if (table.tensors[i].spec->split == SPLIT_NONE)
            *replicated += (double)table.tensors[i].size;
    }
    table_free(&table);
    return total;
}

static void memory_over_tensor(Context *x, double MiB) {
    enum { B = 4, T = 512, C = 1024, NH = 16 };
    GPTConfig config = {8, C, NH, 50257, padded_vocabulary(50257), T, NULL};
    double w = x->bf16 ? 2 : 4, N = B * T;
    printf(
        "     rank 0 of a model of 8 layers, C = %d, V = 50257, T = %d, micro-batches of %d; "
        "MiB\n",
        C, T, B);
    printf("     %-34s %9s %9s %9s %9s   activations a layer: measured, formula\n", "", "weights",
           "formula", "gradients", "optimizer");
    double alone = 0;
    for (int t = 1; t <= 8; t *= 2) {
        for (int sp = 0; sp < 2; sp++) {
            Grid g = {"_tp", t, 1, 1, 1, sp ? "--sequence-parallel 1" : "", true};
            Started s;
            if (t > max_ranks(x)) continue;
            start_of(&g, &s);
            Memory m = dry_run(x, &g, LARGE "--layers 8 --micro-batch 4");
            Memory half = dry_run(x, &g, LARGE "--layers 4 --micro-batch 4");
            // ln1, residual2, ln2 and the residual stream are (N, C) each. qkv, atty, fch and its
            // GELU are (N, 12 C / t) together. The statistics of two layernorms and attention's
            // log-sum-exps are added.
            double rows = sp ? t : 1, layer = N * C * w * (4 / rows + 12.0 / t) + 16 * N / rows;
            layer += B * NH * (double)T * 4 / t;
            double replicated = 0, elements = rank_elements(&g, &config, &replicated);
            double measured = (m.activations - half.activations) / 4;
            if (t == 1) alone = elements - replicated;
            elements = alone / t + replicated;
            elements /= MiB;
            printf("     %-34s %9.1f %9.1f %9.1f %9.1f   %12.2f %12.2f\n", s.name, m.weights,
                   elements * w, m.gradients, m.optimizer, measured, layer / MiB);
            bool ok = near(m.weights, elements * w, 0.06) &&
                      near(m.gradients, elements * 4, 0.06) &&
                      near(m.optimizer, elements * (x->bf16 ? 12 : 8), 0.06) &&
                      near(measured, layer / MiB, 0.01 * measured);
            check(&x->check, ok, "memory %s: 1/t of parameters, gradients and optimizer%s", s.name,
                  sp ? " and of activations" : "");
        }
    }
}

// Checks recomputed activations: all layers of all micro-batches in flight share one
// buffer.
static void memory_over_recomputation(Context *x, double MiB) {
    enum { B = 4, T = 512, C = 1024, NH = 16, L = 8 };
    static const struct {
        Grid grid;
        int in_flight;  // micro-batches on stage 0
    } ROWS[] = {{{"", 1, 1, 1, 1, "", true}, 1},
                {{"_tp", 4, 1, 1, 1, "--sequence-parallel 1", true}, 1},
                {{"_pp", 2, 1, 2, 1, "", true}, 2},
                {{"context", 1, 1, 1, 1, "", true}, 1}};
    // The last one is train_context's.
    static const char *const HOW[] = {"none", "gelu", "layer", "rest"};
    printf("     activations of rank 0 by --recompute, the same model; MiB\n"
           "     %-34s %9s %9s %9s %9s   formulas of what is saved\n",
           "", HOW[0], HOW[1], HOW[2], HOW[3]);
    for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++) {
        Grid g = ROWS[i].grid;
        double w = x->bf16 ? 2 : 4, N = B * T, rows = sequence_parallel(&g) ? g.t : 1, kept[4];
        double gelu = N * 4 * C * w / g.t / MiB;
        double layer =
            (N * C * w * (3 / rows + 12.0 / g.t) + 16 * N / rows + B * NH * (double)T * 4 / g.t) /
            MiB;
        double attention = (N * C * w / g.t + B * NH * (double)T * 4 / g.t) / MiB;
        double shared = ROWS[i].in_flight * (L / g.p) - 1;
        bool rest = strcmp(g.trainer, "context") == 0;
        char flags[128], name[128];
        Started s;
        if (g.t * g.p > max_ranks(x)) continue;
        for (int how = 0; how < (rest ? 4 : 3); how++) {
            snprintf(flags, sizeof flags, "%s --recompute %s", ROWS[i].grid.flags, HOW[how]);
            g.flags = flags;
            kept[how] =
                dry_run(x, &g, LARGE "--layers 8 --micro-batch 4 --global-batch 16").activations;
        }
        g.flags = ROWS[i].grid.flags;
        start_of(&g, &s);
        snprintf(name, sizeof name, "%s", s.name);
        if (!rest) kept[3] = kept[2] + shared * attention;
        printf("     %-34s %9.1f %9.1f %9.1f %9.1f   %.1f %.1f %.1f\n", name, kept[0], kept[1],
               kept[2], kept[3], shared * gelu, shared * layer, shared * (layer - attention));
        check(&x->check,
              near(kept[0] - kept[1], shared * gelu, 0.11) &&
                  near(kept[0] - kept[2], shared * layer, 0.11) &&
                  near(kept[3] - kept[2], shared * attention, 0.11),
              "memory %s: --recompute gelu saves the GELU of %g layers, layer all but their "
              "inputs%s",
              name, shared, rest ? ", rest keeps attention's output and lse" : "");
    }
}

static void memory_over_data(Context *x, double MiB) {
    GPTConfig config = {8, 1024, 16, 50257, padded_vocabulary(50257), 512, NULL};
    printf("     the same over data ranks; MiB%30s optimizer   formula\n", "");
    for (int d = 1; d <= 8 && d <= max_ranks(x); d *= 2) {
        for (int zero = 0; zero < 2; zero++) {
            Grid g = {"_3d", 1, d, 1, 1, zero ? "--zero 1" : "--zero 0", true};
            Started s;
            start_of(&g, &s);
            Memory m = dry_run(x, &g, LARGE "--layers 8 --micro-batch 1 --global-batch 8");
            double elements = rank_elements(&g, &config, NULL) / MiB;
            double formula = elements * (x->bf16 ? 12 : 8) / (zero ? d : 1);
            printf("     %-54s %9.1f %9.1f\n", s.name, m.optimizer, formula);
            check(&x->check,
                  near(m.optimizer, formula, 0.06) && near(m.gradients, elements * 4, 0.06),
                  "memory %s: %s", s.name,
                  zero ? "1/d of the optimizer" : "all of the optimizer");
        }
    }
}

// train_fsdp keeps 1/d of all, or r/d with replicas, and windows. There are windows for the
// gradients of two layers, the embeddings and ln_f. There are as many for weights, or with
// --shard 2 for all weights.
static void memory_over_shards(Context *x, double MiB) {
    GPTConfig config = {8, 1024, 16, 50257, padded_vocabulary(50257), 512, NULL};
    double w = x->bf16 ? 2 : 4;
    printf("     train_fsdp; MiB%43s weights   formula gradients   formula optimizer   formula\n",
           "");
    for (int d = 1; d <= 8 && d <= max_ranks(x); d *= 2) {
        for (int i = 0; i < (d > 2 ? 4 : 2); i++) {
            int shard = 2 + i % 2, shards = d / (1 + i / 2);
            char flags[48];
            snprintf(flags, sizeof flags, "--shard %d%s", shard, i < 2 ? "" : " --replicas 2");
            Grid g = {"fsdp", 1, d, 1, 1, flags, true};
            Started s;
            start_of(&g, &s);
            Memory m = dry_run(x, &g, LARGE "--layers 8 --micro-batch 1 --global-batch 8");
            ParamTable table = stage_table(&config, &g, 0);
            double all = (double)table.total / MiB,
                   layer = (double)(table.buckets[3] - table.buckets[2]) / MiB;
            double two = d > 1 ? all - 6 * layer : 0, weights = d > 1 && shard == 2 ? all : two;
            double want[3] = {(all / shards + weights) * w, (all / shards + two) * 4,
                              all / shards * (x->bf16 ? 12 : 8)};
            printf("     %-54s %9.1f %9.1f %9.1f %9.1f %9.1f %9.1f\n", s.name, m.weights, want[0],
                   m.gradients, want[1], m.optimizer, want[2]);
            check(&x->check, near(m.weights, want[0], 0.06) && near(m.gradients, want[1], 0.06) &&
                  near(m.optimizer, want[2], 0.06), "memory %s: its shard, and windows", s.name);
            table_free(&table);
        }
    }
}

// Checks that stage 0 keeps p micro-batches under 1F1B for any m, and m under GPipe.
static void memory_over_schedules(Context *x) {
    enum { P = 4 };
    double gpipe[3] = {0, 0, 0}, one[3] = {0, 0, 0}, interleaved[3] = {0, 0, 0};
    if (P > max_ranks(x)) return;
    printf(
        "     activations of stage 0 of %d, 8 layers, C = 1024, T = 512; MiB\n     %-14s %9s %9s "
        "%9s\n",
        P, "micro-batches", "gpipe", "1f1b", "v = 2");
    for (int i = 0; i < 3; i++) {
        char model[160];
        snprintf(model, sizeof model, LARGE "--layers 8 --micro-batch 1 --global-batch %d", P << i);
        Grid g = {"_pp", 1, 1, P, 1, "--schedule gpipe", true};
        gpipe[i] = dry_run(x, &g, model).activations;
        g.flags = "--schedule 1f1b";
        one[i] = dry_run(x, &g, model).activations;
        g.v = 2;
        g.flags = "";
        interleaved[i] = dry_run(x, &g, model).activations;
        printf("     %-14d %9.1f %9.1f %9.1f\n", P << i, gpipe[i], one[i], interleaved[i]);
    }
    double slot = (gpipe[2] - gpipe[1]) / (2 * P);  // one micro-batch
    check(
        &x->check,
        near(one[0], gpipe[0], 0.11) && near(one[1], one[0], 0.11) && near(one[2], one[0], 0.11),
        "memory: 1F1B keeps as much for %d and %d micro-batches as for %d", 2 * P, 4 * P, P);
    check(&x->check, near(gpipe[1] - gpipe[0], P * slot, 0.21) && slot > 1,
          "memory: GPipe keeps %.1f MiB more for each micro-batch", slot);
    // 2 (p - 1) + (v - 1) p + 1 chunks in flight, of half the layers; each keeps its output (N,
    // C) too.
    double output = 512 * 1024 * (x->bf16 ? 2 : 4) / 1048576.0, half = (slot - output) / 2 + output;
    check(&x->check,
          near(interleaved[2] - one[2], 11 * half - 4 * slot, 0.6) &&
              near(interleaved[2], interleaved[1], 0.21),
          "memory: interleaved 1F1B keeps 11 half micro-batches");
}

// For each layer of each micro-batch in flight, a split backward keeps four gradients:
// its output's and residual2's, (N, C) each, fch's (N, 4C) and qkv's (N, 3C). Schedule
// zb-h1 has p micro-batches in flight. Schedule zb-auto has as many as it is allowed, by
// default at most 2p.
static void memory_over_halves(Context *x) {
    enum { P = 4, M = 16, LAYERS = 2 };  // of a stage
    if (P > max_ranks(x)) return;
    const char *model = LARGE "--layers 8 --micro-batch 1 --global-batch 16";
    Grid g = {"_pp", 1, 1, P, 1, "--schedule gpipe", true};
    double w = x->bf16 ? 2 : 4, output = 512 * 1024 * w / 1048576.0, halves = LAYERS * 9 * output;
    double gpipe = dry_run(x, &g, model).activations;
    g.flags = "--schedule 1f1b";
    double one = dry_run(x, &g, model).activations, slot = (gpipe - one) / (M - P);
    g.trainer = "zero_bubble";
    g.flags = "--schedule zb-h1";
    double h1 = dry_run(x, &g, model).activations;
    g.flags = "--schedule zb-auto";
    double full = dry_run(x, &g, model).activations;
    g.flags = "--schedule zb-auto --max-in-flight 4";
    double limited = dry_run(x, &g, model).activations;
    printf("     1f1b %.1f, zb-h1 %.1f, zb-auto %.1f, with 4 in flight %.1f MiB\n", one, h1, full,
           limited);
    double kept = P * halves - 7 * output;  // 1F1B has one buffer for the gradients of fch and qkv
    check(&x->check, near(h1 - one, kept, 0.3),
          "memory: zb-h1 keeps 9 (N, C) more a layer than 1F1B: %.1f MiB", kept);
    check(&x->check, near(full - h1, P * (slot + halves), 0.6) && near(limited, h1, 0.2),
          "memory: zb-auto keeps 2p micro-batches, or p if it must");
}

// A chunk of a V is half of a stage. Its slot holds 16 (N, C) for one layer and 9 for the halves,
// its input, ln_f's output and statistics. A stage has 2p slots under zb-v, p + 2 under v-half (p
// even) and 2p + 1 under dualpipe-v. Stage 0 makes the logits, sums the lookups' part of wte's
// gradient apart, and each chunk has buffers of its own for messages.
static void memory_over_v(Context *x) {
    enum { P = 4, N = 512, C = 1024, NH = 16 };
    static const char *const FLAGS[] = {"--schedule zb-v", "--schedule v-half",
                                        "--schedule dualpipe-v"};
    double w = x->bf16 ? 2 : 4, MiB = 1048576.0, rows = N * C * w / MiB, kept[3];
    if (P > max_ranks(x)) return;
    Grid g = {"zero_bubble", 1, 1, P, 1, "--schedule zb-h1", true};
    const char *model = LARGE "--layers 8 --micro-batch 1 --global-batch 16";
    double h1 = dry_run(x, &g, model).activations;
    g.trainer = "v";
    for (int i = 0; i < 3; i++) {
        g.flags = FLAGS[i];
        kept[i] = dry_run(x, &g, model).activations;
    }
    double layer = (16 + 9) * rows + (16 * N + NH * N * 4) / MiB;
    double chunk = layer + rows + rows + 8 * N / MiB, stage = 2 * layer + rows;
    double V = (double)padded_vocabulary(50257);
    double ends = N * V * w / MiB + V * C * 4 / MiB, links = 8 * rows;
    printf("     zb-h1 %.1f, zb-v %.1f, v-half %.1f, dualpipe-v %.1f MiB; a slot of a chunk %.2f\n",
           h1, kept[0], kept[1], kept[2], chunk);
    check(&x->check, near(kept[0] - h1, 2 * P * chunk - P * stage + ends + links, 0.3),
          "memory: zb-v keeps 2p chunks, and has logits and twice the links on stage 0");
    check(&x->check,
          near(kept[0] - kept[1], (P - 2) * chunk, 0.2) && near(kept[2] - kept[0], chunk, 0.2),
          "memory: v-half keeps p + 2 chunks, dualpipe-v 2p + 1");
}

static void group_memory(Context *x) {
    double MiB = 1048576.0;
    memory_over_tensor(x, MiB);
    memory_over_recomputation(x, MiB);
    memory_over_data(x, MiB);
    memory_over_shards(x, MiB);
    memory_over_schedules(x);
    memory_over_halves(x);
    memory_over_v(x);
    // Weights, optimizer, activations and logits all beyond 2^31 bytes, the last two beyond 2^31
    // elements.
    Grid g = {"", 1, 1, 1, 1, "", true};
    GPTConfig xl = {48, 1600, 25, 50257, padded_vocabulary(50257), 1024, NULL};
    Memory m = dry_run(x, &g, "--model d48 --seq 1024 --micro-batch 64");
    double w = x->bf16 ? 2 : 4, N = 64 * 1024, elements = rank_elements(&g, &xl, NULL);
    double acts = N * 1600 * w * 16 * 48 + 64.0 * 25 * 1024 * 4 * 48 + N * 50304 * w;
    check(&x->check,
          near(m.weights, elements * w / MiB, 0.06) && m.activations > acts / MiB &&
              m.activations < 1.1 * acts / MiB,
          "\"int overflow\": d48 with 64 x 1024 tokens needs %.0f and %.0f MiB", m.weights,
          m.activations);
}

// ---- group orders: any order of streams, any delay of messages -------------------------

// Each seed is five steps of orders: with more seeds of fewer steps most of the time would be
// starting.
typedef struct {
    Grid grid;
    const char *env;  // %d: the seed
    int seeds;
} Order;

#define STREAMS "CPU_STREAM_ORDER=random:%d"
#define MESSAGES "NCCL_DELAY=random:%d:200"

static const Order ORDERS[] = {
    {{"_3d", 2, 2, 2, 2, "--sequence-parallel 1", true}, STREAMS " " MESSAGES, 4},
    {{"_pp", 1, 1, 4, 1, "", false}, STREAMS " " MESSAGES, 4},
    {{"_pp", 1, 1, 2, 2, "", false}, STREAMS " " MESSAGES "0", 4},
    {{"_pp", 2, 1, 2, 1, "--schedule gpipe", false}, STREAMS, 2},
    {{"zero_bubble", 1, 2, 3, 1, "--schedule zb-auto", false}, STREAMS " " MESSAGES, 2},
    {{"v", 1, 2, 2, 1, "--schedule dualpipe-v", false}, STREAMS " " MESSAGES, 2},
    {{"v", 2, 1, 2, 1, "--schedule v-half", false}, STREAMS " " MESSAGES, 2},
    {{"_3d", 1, 4, 1, 1, "", false}, STREAMS, 2},
    {{"data", 1, 4, 1, 1, "", false}, STREAMS " " MESSAGES, 2},
    {{"fsdp", 1, 4, 1, 1, "", false}, STREAMS " " MESSAGES, 4},
    {{"fsdp", 1, 2, 1, 1, "--shard 2 --recompute layer", false}, STREAMS, 2},
    {{"fsdp", 1, 4, 1, 1, "--replicas 2", false}, STREAMS " " MESSAGES, 4},
    {{"context", 1, 4, 1, 1, "--context 4", false}, STREAMS " " MESSAGES, 2},
    {{"context", 1, 4, 1, 1, "--context 4 --context-by ring", false}, STREAMS " " MESSAGES, 4},
    {{"context", 1, 2, 1, 1, "--context 2 --context-by ring --recompute layer", false}, STREAMS, 2},
    {{"_tp", 2, 1, 1, 1, "--sequence-parallel 1", false}, MESSAGES, 2},
};

static void group_orders(Context *x) {
    if (on_gpu(x)) return;  // both settings are the stand-ins'
    for (size_t i = 0; i < sizeof ORDERS / sizeof *ORDERS; i++) {
        const Order *order = &ORDERS[i];
        Started s;
        if (skipped(x, &order->grid)) continue;
        const Layout *layout = start_of(&order->grid, &s);
        Log base;
        bool same = true;
        int seed = 0, seeds = x->bf16 ? 1 : order->seeds;
        for (; seed <= seeds && same; seed++) {
            char env[128] = "";
            const char *out = seed ? "other" : "base";
            if (seed) snprintf(env, sizeof env, order->env, seed, seed);
            remove_tree(out);
            remove("log");
            same = runs(
                x, layout, env,
                "--init golden --train-data golden/train.bin --seq 24 "
                "--global-batch 8 --micro-batch 1 --steps 5 --val-every 0 --log log --out %s "
                "--dump-gradients %s.gradients",
                out, out);
            Log log = read_log("log");
            if (!seed) base = log;
            same = same && same_log(&log, &base) &&
                   (!seed || (same_file("other.gradients", "base.gradients") &&
                              same_checkpoint("other/step-00000005", "base/step-00000005")));
            if (!same) printf("     %s\n", env);
        }
        bool ring = order->grid.v > 1 && order->grid.p == 2;
        check(&x->check, same,
              "%s: the same bits for %d seeds of %s; \"order of send and receive\", "
              "\"stream race\"%s",
              s.name, seeds, order->env, ring ? ", \"p = 2 interleaved\"" : "");
    }
}

// ---- group between: validation, samples and traces -------------------------------------

static void group_between(Context *x) {
    static const Grid GRIDS[] = {
        {"", 1, 1, 1, 1, "", true},
        {"_tp", 2, 1, 1, 1, "", false},
        {"_tp", 4, 1, 1, 1, "--sequence-parallel 1", true},
        {"_pp", 1, 1, 2, 2, "", false},
        {"_pp", 2, 1, 3, 1, "--schedule gpipe", false},
        {"_3d", 1, 4, 1, 1, "", false},
        {"data", 1, 2, 1, 1, "", false},
        {"fsdp", 1, 2, 1, 1, "", false},
        {"_3d", 2, 2, 2, 2, "--sequence-parallel 1", true},
    };
    char text[4096] = "";
    Reference ref = random_model(4, 32, 4, 257, 16, 0.1, 5);
    int *tokens = random_tokens(500, 257, 6);
    write_model("bytes", &ref.table, ref.params, INTACT);
    write_shard("bytes.bin", 20240520, 1, 500, tokens, 500);
    static const char BYTES[] = "--init bytes --train-data bytes.bin --seq 16 --micro-batch 1 "
                                "--global-batch 4 --steps 4 --lr 0.002 --log log";
    Log first;
    memset(&first, 0, sizeof first);
    for (size_t i = 0; i < sizeof GRIDS / sizeof *GRIDS; i++) {
        const Grid *g = &GRIDS[i];
        Started s;
        if (skipped(x, g)) continue;
        const Layout *layout = start_of(g, &s);
        remove("log");
        bool ok = runs(x, layout, "", "%s --val-every 0", BYTES);
        Log plain = read_log("log");
        remove("log");
        Outcome o =
            run(x->build, layout, PLAIN,
                "%s --val-data bytes.bin --val-every 2 --val-batches 2 "
                "--sample-every 3 --sample-tokens 24 --prompt Once~upon --trace trace.json",
                BYTES);
        const char *sample = strstr(o.out, "sample: Once upon");
        size_t length = sample ? strcspn(sample, "\n") : 0;
        bool says = length > strlen("sample: Once upon"), as_one_rank = true;
        if (says && i == 0) snprintf(text, sizeof text, "%.*s", (int)length, sample);
        else as_one_rank = says && strlen(text) == length && strncmp(sample, text, length) == 0;
        ok = succeeded(&o) && ok;
        Log log = read_log("log");
        if (i == 0) first = log;
        double worst = log.vals == 3 ? 0 : INFINITY;
        for (size_t k = 0; k < log.vals; k++)
            worst = fmax(worst, relative(log.val[k], first.val[k]));
        check(&x->check, ok && same_log(&plain, &log),
              "%s: validation and samples leave training alone, \"accumulator not reset\"", s.name);
        check(&x->check, worst <= bounds(x, &ref.config).loss,
              "%s: validation losses are those of one rank, %.1e", s.name, worst);
        check(&x->check, says && (x->bf16 || as_one_rank), "%s: the sample is that of one rank",
              s.name);
        TracedRun traced = {g->t * g->d, g->p, g->v, 4 / g->d, 4};
        Error why = {""};
        ok = trace_check("trace.json", &traced, &why);
        check(&x->check, ok,
              "%s: --trace has every step of every rank, and every message twice %s", s.name,
              why.text);
    }
    free(tokens);
    reference_free(&ref);
}

// ---- group bubble: the schedules in the order in which they ran ------------------------

// Plays the trace of a run again with the mean durations of its steps and free messages, as the
// ranks share cores. The bubble of a split backward depends on the times of its halves. Here
// forward and both halves take the same.
static void group_bubble(Context *x) {
    static const Grid GRIDS[] = {
        {"_pp", 1, 1, 4, 1, "--schedule gpipe", true},
        {"_pp", 1, 1, 4, 1, "--schedule 1f1b", true},
        {"_pp", 1, 1, 4, 2, "", true},
        {"zero_bubble", 1, 1, 4, 1, "--schedule zb-h1", false},
        {"zero_bubble", 1, 1, 4, 1, "--schedule zb-auto", false},
        {"v", 1, 1, 4, 1, "--schedule zb-v", false},
        {"v", 1, 1, 4, 1, "--schedule dualpipe-v", false},
    };
    Reference ref = random_model(8, 32, 4, 61, 24, 0.1, 7);
    write_model("eight", &ref.table, ref.params, INTACT);
    reference_free(&ref);
    char command[PATH_MAX + 128], line[256];
    for (size_t i = 0; i < sizeof GRIDS / sizeof *GRIDS; i++) {
        Started s;
        if (skipped(x, &GRIDS[i])) continue;
        remove("trace.json");
        bool ok =
            runs(x, start_of(&GRIDS[i], &s), "",
                 "--init eight --train-data golden/train.bin --seq 24 "
                 "--global-batch 8 --micro-batch 1 --steps 5 --val-every 0 --trace trace.json");
        double bubble = NAN, formula = NAN, base = 3.0 / (8 * GRIDS[i].v);
        bool folded = strcmp(GRIDS[i].trainer, "v") == 0, halves = folded || has(&GRIDS[i], "zb");
        double want = folded ? base / 6 : halves ? base / 3 : base;
        if (folded) base /= 2;  // the formula for two chunks a stage
        snprintf(command, sizeof command,
                 "'%s/../tools/timeline' --step 4 %s --out step.svg trace.json 2>&1", x->build,
                 halves ? "--costs 1,1,1" : "--retime");
        FILE *tool = ok ? popen(command, "r") : NULL;
        while (tool && fgets(line, sizeof line, tool)) {
            const char *at = strstr(line, "bubble ");
            if (at) sscanf(at, "bubble %lf%%, formula %lf", &bubble, &formula);
        }
        bubble /= 100;
        formula /= 100;
        ok = tool && pclose(tool) == 0;
        // The order is the schedule's and the durations are means: nothing is left that could
        // differ.
        check(&x->check, ok && fabs(bubble - want) <= 1e-3 * want && fabs(formula - base) < 1e-4,
              "%s: bubble %.4f, formula %.4f (bound 1e-3)", s.name, bubble, want);
    }
}

// ---- group refusals --------------------------------------------------------------------

#define DATA "--train-data golden/train.bin "
#define SIZES "--seq 24 --global-batch 8 --micro-batch 1 --steps 2 --val-every 0 "
#define GOOD "--init golden " DATA SIZES

typedef struct {
    const char *name;
    Layout layout;
    const char *flags;
    int code;
    const char *says;
} Refusal;

// Refusals of options.h and pipeline.h that all trainers share are in test_options.c
// and test_pipeline.c.
static const Refusal REFUSALS[] = {
    {"heads, before any memory",
     {"train_gpt_tp", 3, ""},
     DATA "--layers 5000 --heads 1024 --channels 65536",
     2,
     "1024 heads"},
    {"ranks that are not t", {"train_gpt_tp", 3, "--tensor 2"}, GOOD, 2, "--tensor 2"},
    {"a flag of pipelines", {"train_gpt_tp", 2, "--pipeline 2"}, GOOD, 2, "train_gpt_pp"},
    {"ranks that are not t * p", {"train_gpt_pp", 3, "--tensor 2"}, GOOD, 2, "--tensor 2"},
    {"a flag of data parallelism", {"train_gpt_pp", 2, "--zero 1"}, GOOD, 2, "train_gpt_3d"},
    {"a flag that data parallelism lacks",
     {"train_data", 2, "--tensor 2"},
     GOOD,
     2,
     "train_gpt_tp"},
    {"one that it has",
     {"train_gpt", 1, "--overlap 0"},
     GOOD,
     2,
     "--overlap is for train_gpt_3d"},
    {"ranks that are not d", {"train_data", 2, "--data 4"}, GOOD, 2, "--data 4"},
    {"everything on every rank", {"train_fsdp", 2, "--zero 0"}, GOOD, 2, "train_data"},
    {"replicas that are no part of d", {"train_fsdp", 4, "--replicas 3"}, GOOD, 2, "must divide"},
    {"a stage that is another lesson",
     {"train_fsdp", 2, "--shard 1"},
     GOOD,
     2,
     "--shard must be one of 2|3"},
    {"a flag of one lesson alone",
     {"train_data", 2, "--shard 3"},
     GOOD,
     2,
     "unknown flag '--shard'"},
    {"layers of too few stages",
     {"train_gpt_pp", 4, "--layers-per-stage 2,2"},
     GOOD,
     2,
     "4 numbers"},
    {"layers that do not sum",
     {"train_gpt_pp", 2, "--layers-per-stage 2,1"},
     GOOD,
     2,
     "the 4 layers"},
    {"a chunk without layers",
     {"train_gpt_3d", 2, "--pipeline 2 --virtual 2 --layers-per-stage 3,1"},
     GOOD,
     2,
     "2 or more"},
    {"layers that are no numbers",
     {"train_gpt_pp", 2, "--layers-per-stage 2;2"},
     GOOD,
     2,
     "2 numbers"},
    {"layers of stages without stages",
     {"train_gpt_tp", 2, "--layers-per-stage 4"},
     GOOD,
     2,
     "train_gpt_pp"},
    {"m", {"train_gpt_pp", 2, "--virtual 2"}, GOOD "--micro-batch 8", 2, "multiple of 2"},
    {"parts that do not divide the data ranks",
     {"train_context", 3, "--context 2"},
     GOOD,
     2,
     "--context 2"},
    {"parts that do not divide the heads",
     {"train_context", 3, "--context 3"},
     GOOD,
     2,
     "--context-by ring"},
    {"\"lengths that 2c does not divide\"",
     {"train_context", 8, "--context 8 --context-by ring"},
     GOOD,
     2,
     "--seq 24"},
    {"blocks of masks that parts cut",
     {"train_context", 2, "--context 2 --context-by ring --dropout 0.1"},
     GOOD,
     2,
     "multiple of 8"},
    {"no such schedule file",
     {"train_gpt_pp", 2, "--schedule-file nowhere.txt"},
     GOOD,
     2,
     "nowhere.txt"},
    {"a file for other stages",
     {"train_gpt_pp", 3, "--schedule-file two.txt"},
     GOOD,
     2,
     "is for 2 stages"},
    {"a file for other micro-batches",
     {"train_gpt_pp", 2, "--schedule-file two.txt"},
     GOOD,
     2,
     "2 micro-batches and"},
    {"a file for other chunks",
     {"train_gpt_pp", 2, "--schedule-file two.txt --virtual 2"},
     GOOD "--global-batch 2",
     2,
     "here are 2, 2 and 2"},
    {"a list that hangs",
     {"train_gpt_3d", 2, "--pipeline 2 --schedule-file hangs.txt"},
     GOOD "--global-batch 2",
     2,
     "deadlock"},
    {"weight steps elsewhere",
     {"train_gpt_pp", 2, "--schedule-file order.txt"},
     GOOD "--global-batch 2",
     2,
     "train_zero_bubble"},
    {"halves elsewhere",
     {"train_gpt_3d", 2, "--pipeline 2 --schedule zb-h1"},
     GOOD,
     2,
     "train_zero_bubble"},
    {"a V elsewhere",
     {"train_zero_bubble", 2, "--pipeline 2 --schedule zb-v"},
     GOOD,
     2,
     "train with train_v"},
    {"no V",
     {"train_v", 2, "--pipeline 2 --schedule 1f1b"},
     GOOD,
     2,
     "has no V"},
    {"too few micro-batches for a V",
     {"train_v", 2, "--pipeline 2 --schedule dualpipe-v"},
     GOOD "--global-batch 2",
     2,
     "needs 4 (2 for each stage) or more micro-batches, not 2"},
    {"three chunks in a V",
     {"train_v", 1, "--pipeline 1 --virtual 3"},
     GOOD,
     2,
     "2 chunks a stage, not 3"},
    {"a file and a name",
     {"train_gpt_pp", 2, "--schedule-file two.txt --schedule 1f1b"},
     GOOD,
     2,
     "exclude"},
    {"ranks that are not t * d * p", {"train_gpt_3d", 6, "--tensor 4"}, GOOD, 2, "--tensor 4"},
    {"the order", {"train_gpt_3d", 2, "--order tdd"}, GOOD, 2, "--order"},
    {"no training data",
     {"train_gpt_3d", 4, "--tensor 2"},
     "--init golden " SIZES,
     2,
     "--train-data"},
    {"no such checkpoint",
     {"train_gpt_3d", 4, "--tensor 2"},
     "--resume nowhere " DATA SIZES,
     2,
     "nowhere"},
    {"a model that does not fit",
     {"train_gpt_3d", 2, "--tensor 2"},
     DATA "--layers 5000 --heads 1024 --channels 65536",
     2,
     "does not fit"},
    {"a token that one data rank meets",
     {"train_gpt_3d", 4, "--data 4"},
     "--init golden --train-data token.bin " SIZES,
     1,
     "token.bin"},
    {"a loss that is not finite",
     {"train_gpt_3d", 4, "--tensor 2 --pipeline 2"},
     GOOD "--lr 1000 --lr-final 1 --clip 0 --weight-decay 1000 --steps 60",
     1,
     "step"},
};

// Schedules in files, each but the first with one mistake.
static const char *const SCHEDULE_FILES[][2] = {
    {"two.txt", "F0 F1 B0 B1\nF0 B0 F1 B1\n"},
    {"hangs.txt", "F0 B0 F1 B1\nF0 F1 B0 B1\n"},
    {"order.txt", "F0 F1 B0 B1 W1 W0\nF0 B0 F1 B1\n"},
};

static void group_refusals(Context *x) {
    if (x->bf16) return;  // they do not depend on the precision
    for (size_t i = 0; i < sizeof SCHEDULE_FILES / sizeof *SCHEDULE_FILES; i++) {
        write_file(SCHEDULE_FILES[i][0], SCHEDULE_FILES[i][1], strlen(SCHEDULE_FILES[i][1]));
    }
    int *tokens = allocate(x->token_count * sizeof(int));
    memcpy(tokens, x->tokens, x->token_count * sizeof(int));
    tokens[24 * 7 + 5] = 61;  // in the last sequence of the first step
    write_shard("token.bin", 20240520, 1, (int)x->token_count, tokens, x->token_count);
    free(tokens);
    for (size_t i = 0; i < sizeof REFUSALS / sizeof *REFUSALS; i++) {
        const Refusal *r = &REFUSALS[i];
        char name[160];
        snprintf(name, sizeof name, "%s (%s %s)", r->name, r->layout.trainer, r->layout.flags);
        check_refusal(x, &r->layout, name, PLAIN, r->flags, r->code, r->says);
    }
    check(&x->check, !file_exists("nowhere"), "refusals leave nothing behind");
}

// ---- main ------------------------------------------------------------------------------

static const Group GROUPS[] = {
    {"checkpoints", group_checkpoints},  // written by one layout, resumed by another
    {"replicas", group_replicas},        // stay bit-equal
    {"sums", group_sums},                // the same in NCCL's order of additions
    {"traffic", group_traffic},          // calls and bytes against the formulas
    {"memory", group_memory},            // bytes held against the formulas
    {"orders", group_orders},            // random orders of streams and delays of messages
    {"between", group_between},          // validation, samples, traces
    {"bubble", group_bubble},            // against the formula
    {"refusals", group_refusals},        // by all ranks, in one sentence
};

int main(int argc, char **argv) {
    static Context context;
    prefer_plain_kernels();
    return test_trainers(&context, GROUPS, sizeof GROUPS / sizeof *GROUPS, argc, argv);
}
