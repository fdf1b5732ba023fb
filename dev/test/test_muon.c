// test_muon.c: tests train_muon.
//   It agrees with the fp64 reference and with PyTorch at many layouts. Options that must not
//   change bits change none. Other numbers of ranks resume checkpoints. Bytes and memory follow
//   formulas. Bad input is refused.
//
//   test_muon BUILD_DIR [GROUP]      dev/test/run_muon.sh starts it
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "dev/test/compare_runs.h"
#include "llmc/model_muon.h"
#include "llmc/reference_muon.h"

enum { L = 3, C = 24, NH = 2, V = 33, T = 16, G = 24, STEPS = 4 };

static const Training TRAINING = {T, G, STEPS, 3e-3, 0.1, 1.0, 0.9, 0.95, 1e-8, 0};

// The flags of Muon that the reference has, too.
static struct {
    double momentum;
    size_t steps;
} tested = {0.95, 5};

static void update_muon(Reference *ref, const Training *h, size_t step, double grad_scale) {
    reference_muon(ref, tested.momentum, tested.steps, step, h->lr, h->beta1, h->beta2, h->eps,
                   h->weight_decay, grad_scale);
}

// ---- group reference -------------------------------------------------------------------

// Takes a matrix with known singular values. The polynomial acts on each of them, and on
// nothing else.
static void group_reference(Context *x) {
    static const size_t shapes[][2] = {{5, 5}, {4, 9}, {9, 4}, {1, 6}, {6, 1}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        size_t rows = shapes[i][0], cols = shapes[i][1];
        size_t m = rows < cols ? rows : cols;
        double *matrix = allocate(rows * cols * sizeof(double)), norm = 0, worst = 0;
        for (size_t k = 0; k < m; k++) {  // a permutation of a diagonal
            double value = 1.0 / (double)(1 + k * k);
            matrix[k * cols + (m - 1 - k)] = k % 2 ? -value : value;
            norm += value * value;
        }
        double *want = allocate(rows * cols * sizeof(double));
        for (size_t k = 0; k < rows * cols; k++) {
            double s = matrix[k] / (sqrt(norm) + 1e-7);
            for (int step = 0; step < 5; step++)
                s = 3.4445 * s - 4.7750 * pow(s, 3) + 2.0315 * pow(s, 5);
            want[k] = s;
        }
        reference_orthogonalise(matrix, rows, cols, 5);
        for (size_t k = 0; k < rows * cols; k++) worst = fmax(worst, fabs(matrix[k] - want[k]));
        check(&x->check, worst < 1e-14,
              "reference, %zu x %zu: singular values by the polynomial, %.1e", rows, cols, worst);
        free(matrix), free(want);
    }
}

// ---- group dealt -----------------------------------------------------------------------

// Tests that every block has an owner and that blocks fill their buckets. No rank has more work
// than the least loaded rank plus the most expensive block.
static void group_dealt(Context *x) {
    for (size_t d = 1; d <= 64; d = d < 8 ? d + 1 : 2 * d) {
        MuonSpec spec;
        muon_spec(&spec);
        GPTConfig config = {12, 768, 12, 50257, 50304, 1024, &spec.model};
        Shard whole = shard_whole(&config);
        whole.bucket_align = TENSOR_ALIGN * d;
        ParamTable table = table_make(&config, whole);
        MuonBlock *blocks = muon_blocks(&table);
        size_t count = config.L * LAYER_MATRICES;
        double loads[64] = {0}, all = 0, most = 0, least = INFINITY, dearest = 0;
        bool ok = true;
        muon_deal(blocks, count, d);
        for (size_t i = 0; i < count; i++) {
            const MuonBlock *b = &blocks[i];
            size_t layer = i / LAYER_MATRICES, in_layer = i % LAYER_MATRICES;
            const size_t *bucket = &table.buckets[BUCKET_LAYERS + layer];
            ok = ok && b->lo == (in_layer ? b[-1].hi : bucket[0]) && b->lo < b->hi;
            ok = ok && (in_layer + 1 < LAYER_MATRICES || b->hi == bucket[1]);
            ok = ok && b->owner >= 0 && b->owner < (int)d;
            if (!ok) break;
            loads[b->owner] += b->cost;
            all += b->cost;
            dearest = fmax(dearest, b->cost);
        }
        for (size_t r = 0; r < d; r++) {
            most = fmax(most, loads[r]);
            least = fmin(least, loads[r]);
        }
        check(&x->check, ok && most - least <= dearest && all == 60.0 * 12 * pow(768, 3),
              "GPT-2 124M over %zu ranks: 60 L C^3 FLOPs a step, the busiest has %.3f of the mean",
              d, most / (all / (double)d));
        free(blocks);
        table_free(&table);
    }
}

// ---- group golden: PyTorch in float64 --------------------------------------------------

static double pair_of(const cJSON *tensors, const char *name, int i) {
    const cJSON *pair = cJSON_GetObjectItemCaseSensitive(tensors, name);
    const cJSON *item = cJSON_GetArrayItem(pair, i);
    return cJSON_IsNumber(item) ? item->valuedouble : NAN;
}

// Returns the worst distance of the tensors' norms and products from the file's, as a share
// of the norm. flat: laid out by the table. Skips the bias of q, k and v: the keys' part has
// a gradient of rounding errors alone, and AdamW makes steps of them.
static double golden_error(const ParamTable *table, const double *flat, const cJSON *tensors) {
    double worst = 0;
    for (size_t i = 0; i < table->count; i++) {
        const Tensor *x = &table->tensors[i];
        double norm = 0, product = 0;
        uint64_t state = 7;
        if (x->spec->kind == QKVB) continue;
        for (size_t k = 0; k < x->rows * x->cols; k++) {
            double value = flat[x->offset + k];
            norm += value * value;
            product += value * noise(&state);
        }
        double want = pair_of(tensors, x->name, 0);
        double error = fmax(fabs(sqrt(norm) - want), fabs(product - pair_of(tensors, x->name, 1)));
        if (!(error / want <= worst)) worst = error / want;
    }
    return worst;
}

static double list_error(const cJSON *json, const char *key, const double *got, size_t count) {
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(json, key);
    double worst = 0;
    for (size_t i = 0; i < count; i++) {
        const cJSON *item = cJSON_GetArrayItem(list, (int)i);
        double error = cJSON_IsNumber(item) ? relative(got[i], item->valuedouble) : INFINITY;
        if (!(error <= worst)) worst = error;
    }
    return worst;
}

static void group_golden(Context *x) {
    cJSON *json = read_json("golden/muon.json");
    const ParamTable *table = &x->golden.table;
    Training h = {(size_t)number(json, "seq"),   (size_t)number(json, "global_batch"),
                  (size_t)number(json, "steps"), number(json, "lr"),
                  number(json, "weight_decay"),  number(json, "clip"),
                  number(json, "beta1"),         number(json, "beta2"),
                  number(json, "eps"),           0};
    const cJSON *first = cJSON_GetObjectItemCaseSensitive(json, "first");
    const cJSON *last = cJSON_GetObjectItemCaseSensitive(json, "last");
    const cJSON *weights = cJSON_GetObjectItemCaseSensitive(json, "weights");
    Reference ref = reference_copy(&x->golden);
    Expected e = reference_train(&ref, &h, x->tokens, false);
    double losses = list_error(json, "losses", e.losses, h.steps);
    double norms = list_error(json, "grad_norms", e.norms, h.steps);
    double of_first = golden_error(table, e.gradients, first);
    double of_last = golden_error(table, ref.grads, last);
    double of_weights = golden_error(table, e.weights, weights);
    check(&x->check, fmax(fmax(fmax(losses, norms), fmax(of_first, of_last)), of_weights) < 1e-9,
          "PyTorch and the reference: losses %.1e, norms %.1e, gradients of step 1 %.1e and 6 "
          "%.1e, weights %.1e",
          losses, norms, of_first, of_last, of_weights);
    expected_free(&e);
    reference_free(&ref);

    static const struct { int d; const char *flags; } rows[] = {
        {1, "--micro-batch 8"}, {2, "--micro-batch 1"}, {4, "--micro-batch 2"},
        {8, "--micro-batch 1"}, {4, "--micro-batch 1 --distribute gathered"},
        {8, "--micro-batch 1 --distribute gathered --recompute layer --overlap 0"},
    };
    char flags[ARG_BYTES];
    double *got = allocate(table->total * sizeof(double));
    training_flags(flags, &h, "golden", "golden/train.bin");
    for (size_t i = 0; i < sizeof rows / sizeof *rows && !x->bf16; i++) {
        Layout layout = {"train_muon", rows[i].d, rows[i].flags};
        if (rows[i].d > max_ranks(x)) continue;
        remove_tree("out");
        bool ok = runs(x, &layout, "",
                       "%s --log log --dump-gradients gradients --out out --save-every 5", flags);
        Log log = read_log("log");
        ok = ok && log.steps == h.steps && read_tensors("gradients", "", table, got);
        of_first = golden_error(table, got, first);
        ok = ok && read_tensors("out/step-00000006/model.safetensors", "", table, got);
        of_weights = golden_error(table, got, weights);

        // The last step's gradients are the first of a run that resumes before it.
        char *again = replaced(flags, "--init golden", "--resume out/step-00000005");
        ok = ok && runs(x, &layout, "", "%s --dump-gradients gradients", again) &&
             read_tensors("gradients", "", table, got);
        of_last = golden_error(table, got, last);
        losses = list_error(json, "losses", log.loss, h.steps);
        norms = list_error(json, "grad_norms", log.norm, h.steps);
        check(&x->check,
              ok && fmax(losses, norms) < 1e-5 && fmax(of_first, of_last) < 1e-5 &&
                  of_weights < 1e-5,
              "PyTorch and d %d %s: losses %.1e, norms %.1e, gradients of step 1 %.1e and 6 %.1e, "
              "weights %.1e",
              rows[i].d, rows[i].flags, losses, norms, of_first, of_last, of_weights);
        free(again);
    }
    free(got);
    cJSON_Delete(json);
}

// ---- group layouts ---------------------------------------------------------------------

typedef struct {
    int d;
    double momentum;
    size_t steps;
    double dropout;
    const char *flags;
} Row;

static const Row LAYOUTS[] = {
    {1, 0.95, 5, 0, "--micro-batch 4"},
    {1, 0, 1, 0, "--micro-batch 24"},
    {2, 0.95, 5, 0, "--micro-batch 3"},
    {2, 0.9, 3, 0, "--micro-batch 2 --distribute gathered"},
    {3, 0.95, 5, 0, "--micro-batch 2 --recompute gelu"},
    {3, 0.95, 5, 0, "--micro-batch 8 --distribute gathered"},
    {4, 0.95, 5, 0.2, "--micro-batch 2"},
    {4, 0.95, 5, 0, "--micro-batch 1 --overlap 0 --recompute layer"},
    {4, 0.95, 5, 0, "--micro-batch 3 --distribute gathered --recompute layer"},
    {8, 0.95, 5, 0, "--micro-batch 1"},
    {8, 0.5, 2, 0.2, "--micro-batch 3 --recompute layer"},
    {8, 0.95, 5, 0, "--micro-batch 1 --distribute gathered"},
};

static void group_layouts(Context *x) {
    char flags[ARG_BYTES], name[160];
    size_t count = G * T * STEPS + 1;
    int *tokens = random_tokens(count, V, 21);
    write_shard("shard.bin", 20240520, 1, (int)count, tokens, count);
    for (size_t i = 0; i < sizeof LAYOUTS / sizeof *LAYOUTS; i++) {
        const Row *row = &LAYOUTS[i];
        Training h = TRAINING;
        h.dropout = row->dropout;
        if (row->d > max_ranks(x)) continue;
        Reference ref = random_model(L, C, NH, V, T, 0.2, 40 + i);
        tested.momentum = row->momentum;
        tested.steps = row->steps;
        write_model("model", &ref.table, ref.params, INTACT);
        Expected want = reference_train(&ref, &h, tokens, x->bf16);
        training_flags(flags, &h, "model", "shard.bin");
        Layout layout = {"train_muon", row->d, row->flags};
        runs(x, &layout, "",
             "%s --muon-momentum %g --muon-steps %zu --log log --dump-gradients gradients", flags,
             row->momentum, row->steps);
        Errors errors;
        snprintf(name, sizeof name, "d %d, momentum %g, %zu steps, dropout %g, %s", row->d,
                 row->momentum, row->steps, row->dropout, row->flags);
        check_run(x, name, &ref.table, &want, h.steps, &errors);
        expected_free(&want);
        reference_free(&ref);
    }
    tested.momentum = 0.95;
    tested.steps = 5;
    free(tokens);
}

// ---- group bits ------------------------------------------------------------------------

typedef struct {
    const char *flags, *env;
    int seeds;
} Bits;

static const Bits BITS[] = {
    {"", "", 1},
    {"--recompute gelu", "", 1},
    {"--recompute layer", "", 1},
    {"--overlap 0", "", 1},
    {"--debug-replicas 1", "", 1},
    {"--trace trace.json", "", 1},
    {"--distribute gathered", "", 1},
    {"--distribute gathered --overlap 0", "", 1},
    {"", "CPU_STREAM_ORDER=random:%d", 4},
    {"--distribute gathered", "CPU_STREAM_ORDER=random:%d NCCL_DELAY=random:%d:2000", 3},
    {"", "CPU_THREAD_ORDER=random:%d", 2},
    {"--overlap 0", "CPU_STREAM_ORDER=random:%d", 1},
};

// Compares bits without --clip. With it they may differ. Parts of a gradient's squares add up in
// another order than the whole's. So the norm of gathered updates may differ by a rounding in
// double.
static void group_bits(Context *x) {
    char flags[ARG_BYTES], env[96];
    size_t count = G * T * STEPS + 1;
    int *tokens = random_tokens(count, V, 22);
    Reference ref = random_model(L, C, NH, V, T, 0.2, 60);
    Training h = TRAINING;
    h.dropout = 0.1;
    h.clip = 0;
    write_shard("shard.bin", 20240520, 1, (int)count, tokens, count);
    write_model("model", &ref.table, ref.params, INTACT);
    training_flags(flags, &h, "model", "shard.bin");
    for (int d = 2; d <= 4; d++) {
        Layout layout = {"train_muon", d, ""};
        bool same = true;
        for (size_t i = 0; i < sizeof BITS / sizeof *BITS && same; i++) {
            int seeds = on_gpu(x) && strncmp(BITS[i].env, "CPU_", 4) == 0 ? 0 : BITS[i].seeds;
            for (int seed = 1; seed <= seeds && same; seed++) {
                snprintf(env, sizeof env, BITS[i].env, seed, seed);
                const char *out = i == 0 ? "base" : "other";
                remove_tree(out);
                same = runs(x, &layout, env, "%s --micro-batch 2 --out %s %s", flags, out,
                            BITS[i].flags) &&
                       (i == 0 || same_checkpoint("base/step-00000004", "other/step-00000004"));
                if (!same) printf("     %s %s\n", BITS[i].flags, env);
            }
        }
        check(&x->check, same,
              "d %d: same bits with recomputation, without overlap, of gathered updates, whatever "
              "the order of streams, messages and threads",
              d);
    }
    free(tokens);
    reference_free(&ref);
}

// ---- group checkpoints -----------------------------------------------------------------

static const char FOUR_STEPS[] =
    "--train-data shard.bin --shuffle 1 --seq 16 --global-batch 24 --micro-batch 1 "
    "--steps 4 --lr 0.003 --warmup 2 --val-every 0 --save-every 2 --keep 0 --log log "
    "--layers 3 --heads 2 --channels 24 --vocab 33 --max-seq 16";

// Returns the error of a checkpoint's weights and momenta of matrices against another's.
static double checkpoint_error(const char *folder, const char *base, const ParamTable *table) {
    double *want = allocate(table->total * sizeof(double)), worst = INFINITY;
    double *got = allocate(table->total * sizeof(double));
    char path[128], other[128];
    snprintf(path, sizeof path, "%s/model.safetensors", base);
    snprintf(other, sizeof other, "%s/model.safetensors", folder);
    if (read_tensors(path, "", table, want)) worst = state_errors(table, other, "", want).worst;

    ParamTable matrices = *table;
    matrices.count = 0;
    matrices.tensors = allocate(table->count * sizeof(Tensor));
    for (size_t i = 0; i < table->count; i++) {
        if (reference_is_matrix(&table->tensors[i]))
            matrices.tensors[matrices.count++] = table->tensors[i];
    }
    snprintf(path, sizeof path, "%s/optimizer.safetensors", base);
    snprintf(other, sizeof other, "%s/optimizer.safetensors", folder);
    if (read_tensors(path, ".momentum", &matrices, want) &&
        read_tensors(other, ".momentum", &matrices, got)) {
        for (size_t i = 0; i < matrices.count; i++)
            worst = fmax(worst, tensor_error(&matrices.tensors[i], got, want));
    } else {
        worst = INFINITY;
    }
    free(matrices.tensors), free(want), free(got);
    return worst;
}

static void group_checkpoints(Context *x) {
    static const struct { int d; const char *flags; } PLACES[] = {  // resumes the one before
        {1, ""}, {4, ""}, {2, "--distribute gathered"}, {8, ""}, {3, ""},
        {8, "--distribute gathered"}, {2, ""}};
    enum { COUNT = sizeof PLACES / sizeof *PLACES };
    char from[64], base[] = "place-0/step-00000004";
    size_t count = 1000;
    int *tokens = random_tokens(count, V, 23);
    Reference ref = random_model(L, C, NH, V, T, 0.2, 1);  // for its table
    write_shard("shard.bin", 20240520, 1, (int)count, tokens, count);
    for (size_t p = 0; p < COUNT; p++) {
        Layout layout = {"train_muon", PLACES[p].d, PLACES[p].flags};
        if (PLACES[p].d > max_ranks(x)) continue;
        remove("log");
        snprintf(from, sizeof from, "place-%zu/step-00000004", p);
        bool ok = runs(x, &layout, "", "%s --out place-%zu", FOUR_STEPS, p);
        Log log = read_log("log");
        ok = ok && runs(x, &layout, "", "%s --out again --resume place-%zu/step-00000002",
                        FOUR_STEPS, p);
        Log again = read_log("log");
        check(&x->check,
              ok && same_log(&again, &log) && same_checkpoint("again/step-00000004", from),
              "d %d %s: resumed by itself with the same bits", PLACES[p].d, PLACES[p].flags);
        remove_tree("again");
        if (p == 0) continue;
        ok = runs(x, &layout, "", "%s --out again --resume place-%zu/step-00000002", FOUR_STEPS,
                  p - 1);
        double error = ok ? checkpoint_error("again/step-00000004", base, &ref.table) : INFINITY;
        check(&x->check, ok && error < (x->bf16 ? 0.05 : 5e-5),
              "d %d %s -> d %d %s: the checkpoint is one rank's, %.1e", PLACES[p - 1].d,
              PLACES[p - 1].flags, PLACES[p].d, PLACES[p].flags, error);
        remove_tree("again");
    }

    // Another optimizer's checkpoint is refused, and gives its weights.
    Layout muon = {"train_muon", 2, ""}, adamw = {"train_data", 2, ""};
    char flags[ARG_BYTES];
    bool ok = runs(x, &adamw, "", "%s --out of-adamw", FOUR_STEPS);
    check(&x->check, ok, "a checkpoint of AdamW");
    snprintf(flags, sizeof flags, "%s --resume of-adamw/step-00000002", FOUR_STEPS);
    check_refusal(x, &muon, "Muon resumes it", PLAIN, flags, 2,
                  "is of a run with AdamW, and this trainer updates h.0.attn.c_attn.weight with "
                  "Muon");
    snprintf(flags, sizeof flags, "%s --resume place-1/step-00000002", FOUR_STEPS);
    check_refusal(x, &adamw, "AdamW resumes one of Muon", PLAIN, flags, 2,
                  "is of a run with Muon, and this trainer updates h.0.attn.c_attn.weight with "
                  "AdamW");
    ok = runs(x, &muon, "", "%s --out new --init of-adamw/step-00000002", FOUR_STEPS) &&
         runs(x, &adamw, "", "%s --out old --init place-1/step-00000002", FOUR_STEPS);
    check(&x->check, ok, "each begins with the other's weights");
    free(tokens);
    reference_free(&ref);
}

// ---- group replicas --------------------------------------------------------------------

static void group_replicas(Context *x) {
    static const char *const rows[] = {"", "--distribute gathered"};
    for (size_t i = 0; i < 2; i++) {
        Layout layout = {"train_muon", 4, rows[i]};
        remove("log");
        bool ok = runs(x, &layout, "",
                       "--init golden --train-data golden/train.bin --seq 24 --global-batch 8 "
                       "--micro-batch 1 --steps 20 --lr 0.003 --val-every 0 --log log "
                       "--debug-replicas 1");
        Log log = read_log("log");
        check(&x->check, ok && log.steps == 20 && log.loss[19] < log.loss[0],
              "d 4 %s: replicas are bit-equal after each of 20 steps", rows[i]);
    }
}

// ---- group costs: bytes and memory by formulas -----------------------------------------

// Sums what all ranks sent by one operation on the communicator of the data ranks.
static double bytes_sent(const char *text, const char *op) {
    double sum = 0;
    char kind[32];
    for (const char *line = strstr(text, "traffic: data "); line;
         line = strstr(line + 1, "traffic: data ")) {
        unsigned long long sent;
        if (sscanf(line, "traffic: data rank %*d of %*d, %31[^:]: %*u calls, %llu", kind, &sent) ==
                2 &&
            strcmp(kind, op) == 0)
            sum += (double)sent;
    }
    return sum;
}

// Runs two steps of a model with P elements in its layers' buckets and E in the others. With
// whole matrices (d - 1) P elements are reduced, and as many broadcast. Gathered, there are a
// reduce-scatter, an all-gather of fp32 updates and one of weights.
static void group_costs(Context *x) {
    double width = x->bf16 ? 2 : 4;
    for (int d = 2; d <= 8 && d <= max_ranks(x); d *= 2) {
        for (int gathered = 0; gathered < 2; gathered++) {
            GPTConfig config = {4, 32, 4, 61, 128, 24, NULL};
            Shard whole = shard_whole(&config);
            whole.bucket_align = TENSOR_ALIGN * (size_t)d;
            ParamTable table = table_make(&config, whole);
            const size_t *at = table.buckets;
            double layers = (double)(at[BUCKET_LAYERS + config.L] - at[BUCKET_LAYERS]);
            double others = (double)table.total - layers, times = 2.0 * (d - 1);
            Layout layout = {"train_muon", d, gathered ? "--distribute gathered" : ""};
            Setting setting = {"NCCL_TRAFFIC=1", 0};
            Outcome o = run(x->build, &layout, setting,
                            "--init golden --train-data golden/train.bin --seq 24 "
                            "--global-batch 8 --steps 2 --micro-batch 1 --val-every 0");
            double reduced = bytes_sent(o.err, "ncclReduce");
            double sent = bytes_sent(o.err, "ncclBroadcast");
            double scattered = bytes_sent(o.err, "ncclReduceScatter");
            double all_gathered = bytes_sent(o.err, "ncclAllGather");
            bool ok = o.code == 0 && reduced == (gathered ? 0 : times * 4 * layers) &&
                      sent == (gathered ? 0 : times * width * layers) &&
                      scattered == times * 4 * (others + (gathered ? layers : 0)) &&
                      all_gathered ==
                          times * (width * others + (gathered ? (4 + width) * layers : 0));
            check(&x->check, ok, "d %d, %s: %.0f bytes sent, by the formula", d,
                  gathered ? "gathered" : "whole", reduced + sent + scattered + all_gathered);
            outcome_free(&o);
            table_free(&table);
        }
    }

    // The optimizer's MiB, all ranks together: 8 bytes an element, 4 of a matrix; bf16 has 4 more.
    for (int d = 1; d <= 8 && d <= max_ranks(x); d *= 2) {
        for (int gathered = 0; gathered < 2; gathered++) {
            GPTConfig config = {8, 512, 8, 257, 384, 128, NULL};
            Shard whole = shard_whole(&config);
            whole.bucket_align = TENSOR_ALIGN * (size_t)d;
            ParamTable table = table_make(&config, whole);
            double matrices = 8 * 12.0 * 512 * 512, all = (double)table.total;
            double want = (8 * all - 4 * matrices + (x->bf16 ? 4 * all : 0)) / 1048576, got = 0;
            Layout layout = {"train_muon", d, gathered ? "--distribute gathered" : ""};
            Outcome o = run(x->build, &layout, PLAIN,
                            "--dry-run --layers 8 --channels 512 --heads 8 --seq 128");
            const char *line = strstr(o.out, "\noptimizer");
            if (d == 1 && line) sscanf(line, "\noptimizer %lf MiB", &got);
            // A row for each rank: its MiB of weights, gradients, optimizer, activations.
            const char *rows = strstr(o.out, "MiB per rank");
            for (int r = 0; rows && d > 1 && r < d; r++) {
                double own = 0;
                rows = strchr(rows, '\n');
                if (!rows || sscanf(++rows, "%*s %*s %*s %lf", &own) != 1) break;
                got += own;
            }
            check(&x->check, o.code == 0 && fabs(got - want) <= 0.06 * d + 0.01,
                  "d %d, %s: %.1f MiB of optimizer on all ranks, %.1f by the formula", d,
                  gathered ? "gathered" : "whole", got, want);
            if (fabs(got - want) > 0.06 * d + 0.01) printf("%s\n", o.out);
            outcome_free(&o);
            table_free(&table);
        }
    }
}

// ---- group refusals --------------------------------------------------------------------

static void group_refusals(Context *x) {
    static const struct { int d; const char *flags, *says; } rows[] = {
        {2, "--zero 0", "--zero 0 keeps the optimizer whole on every rank: use train_data"},
        {1, "--muon-steps 0", "--muon-steps must be a whole number from 1 to 100, not '0'"},
        {1, "--muon-momentum 1.5", "--muon-momentum must be a number from 0 to 1, not '1.5'"},
        {1, "--muon-momentum nan", "--muon-momentum must be a number"},
        {2, "--distribute all", "--distribute must be one of whole|gathered, not 'all'"},
        {1, "--muon-step 5", "unknown flag '--muon-step': did you mean --muon-steps?"},
        {1, "--tensor 2", "--tensor is for train_gpt_tp"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        Layout layout = {"train_muon", rows[i].d, rows[i].flags};
        check_refusal(x, &layout, rows[i].flags, PLAIN,
                      "--train-data golden/train.bin --out refused", 2, rows[i].says);
    }
    check(&x->check, !file_exists("refused"), "and nothing is left behind");
}

int main(int argc, char **argv) {
    static Context x;
    static const Group groups[] = {
        {"reference", group_reference}, {"dealt", group_dealt},
        {"golden", group_golden},       {"layouts", group_layouts},
        {"bits", group_bits},           {"checkpoints", group_checkpoints},
        {"replicas", group_replicas},   {"costs", group_costs},
        {"refusals", group_refusals}};
    reference_update = update_muon;
    prefer_plain_kernels();
    return test_trainers(&x, groups, sizeof groups / sizeof *groups, argc, argv);
}
