// test_documents.c: tests train_documents against the fp64 reference at several layouts, and
// against its documents trained one by one. Options that must not change bits change none.
//
//   test_documents BUILD_DIR [GROUP]      for example: test_documents build/cpu-fp32 layouts
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "dev/test/compare_runs.h"

enum { L = 2, C = 32, NH = 4, V = 33, EOT = V - 1, T = 64, G = 8, STEPS = 2 };

static const Training TRAINING = {T, G, STEPS, 3e-3, 0.1, 1.0, 0.9, 0.95, 1e-8, 0};

// The token that begins a document, for the reference.
static int eot = EOT;

// GPT-2 over documents.
static double tested_loss(Reference *ref, const int *tokens, const int *targets, size_t B,
                          size_t seq, double scale) {
    int *first = document_begins(tokens, B * seq, seq, eot);
    ref->first = first;
    double loss = reference_loss_and_gradients(ref, tokens, targets, B, seq, scale);
    ref->first = NULL;
    free(first);
    return loss;
}

// Returns tokens of `count` sequences, which are of eight kinds. Kind 0 is one document, and kind
// 1 has documents of one token. In kind 2 documents begin at the borders of ranks and beside
// them. The others have random lengths. In bf16 equal tokens have equal errors, which do not
// average, so documents of one token must be few.
static int *documents(size_t count, size_t seq, uint64_t seed) {
    static const size_t borders[] = {0, 1, 7, 8, 17, 31, 32, 33, 48};
    int *tokens = random_tokens(count * seq + 1, EOT, seed);
    int *lengths = random_tokens(count * seq + 1, 9, seed + 1);
    for (size_t n = 0; n < count * seq; n++) {
        size_t t = n % seq, kind = n / seq % 8;
        if (kind == 1 || (kind > 2 && lengths[n] == 0)) tokens[n] = EOT;
        for (size_t i = 0; i < sizeof borders / sizeof *borders && kind == 2; i++)
            if (t == borders[i] * (seq / T)) tokens[n] = EOT;
    }
    free(lengths);
    return tokens;
}

// ---- group reference -------------------------------------------------------------------

static void group_reference(Context *x) {
    Reference ref = random_model(1, 8, 2, 7, 9, 0.3, 3);
    int *tokens = random_tokens(3 * 9 + 1, 7, 4);
    eot = 2;
    Errors e = compare_differences(&ref, tested_loss, tokens, 3, 9);
    eot = EOT;
    check(&x->check, e.worst < 1e-5, "the reference's gradients are central differences: %.1e (%s)",
          e.worst, e.name);
    free(tokens);
    reference_free(&ref);
}

// ---- group layouts ---------------------------------------------------------------------

typedef struct {
    int d;
    size_t seq;
    double dropout;
    bool bf16;  // in bf16 too
    const char *flags;
} Row;

static const Row LAYOUTS[] = {
    {1, T, 0, true, "--micro-batch 4"},
    {2, T, 0.2, false, "--micro-batch 2 --recompute layer"},
    {2, T, 0.2, false, "--micro-batch 4 --context 2 --recompute rest"},
    {2, 4 * T, 0, true, "--micro-batch 8 --context 2 --context-by ring"},
    {4, T, 0, false, "--micro-batch 1 --context 2 --context-by ring --context-layout contiguous"},
    {4, T, 0.2, true, "--micro-batch 8 --context 4 --context-by ring --recompute rest"},
    {4, T, 0, false, "--micro-batch 2 --context 4 --context-by ring --recompute layer"},
    {4, T, 0, true, "--micro-batch 2 --context 4 --context-layout contiguous"},
    {8, T, 0.2, false, "--micro-batch 4 --context 4 --context-by ring --zero 0 --overlap 0"},
};

static void group_layouts(Context *x) {
    char flags[ARG_BYTES], name[160];
    for (size_t i = 0; i < sizeof LAYOUTS / sizeof *LAYOUTS; i++) {
        const Row *row = &LAYOUTS[i];
        if (row->d > max_ranks(x) || (x->bf16 && !row->bf16)) continue;
        size_t count = G * STEPS;
        int *tokens = documents(count, row->seq, 21 + 2 * i);
        write_shard("shard.bin", 20240520, 1, (int)(count * row->seq + 1), tokens,
                    count * row->seq + 1);
        Training h = TRAINING;
        h.seq = row->seq;
        h.dropout = row->dropout;
        Reference ref = random_model(L, C, NH, V, row->seq, 0.2, 40 + i);
        write_model("model", &ref.table, ref.params, INTACT);
        Expected want = reference_train(&ref, &h, tokens, x->bf16);
        training_flags(flags, &h, "model", "shard.bin");
        Layout layout = {"train_documents", row->d, row->flags};
        runs(x, &layout, "", "%s --log log --dump-gradients gradients", flags);
        Errors errors;
        snprintf(name, sizeof name, "d %d, T %zu, dropout %g, %s", row->d, row->seq, row->dropout,
                 row->flags);
        check_run(x, name, &ref.table, &want, h.steps, &errors);
        expected_free(&want);
        reference_free(&ref);
        free(tokens);
    }
}

// ---- group alone: documents trained one by one, by a trainer that knows none -----------

static void group_alone(Context *x) {
    static const size_t lengths[] = {1, 5, 26, 32};
    char flags[ARG_BYTES];
    int *tokens = random_tokens(T + 1, EOT, 7);
    Reference ref = random_model(L, C, NH, V, T, 0.2, 8);  // for its weights and its table
    Training h = TRAINING;
    size_t total = ref.table.total;
    double *want = allocate(total * sizeof(double)), *got = allocate(total * sizeof(double));
    double loss = 0;
    bool ok = true;
    h.global_batch = 1;
    h.steps = 1;
    write_model("model", &ref.table, ref.params, INTACT);
    for (size_t i = 0, t = 0; i < 4; t += lengths[i++]) tokens[t] = EOT;
    for (size_t i = 0, t = 0; i < 4; t += lengths[i++]) {
        double share = (double)lengths[i] / T;
        h.seq = lengths[i];
        write_shard("shard.bin", 20240520, 1, (int)h.seq + 1, tokens + t, h.seq + 1);
        training_flags(flags, &h, "model", "shard.bin");
        Layout layout = {"train_data", 1, "--micro-batch 1"};
        ok = ok && runs(x, &layout, "", "%s --log log --dump-gradients gradients", flags) &&
             read_tensors("gradients", "", &ref.table, got);
        loss += share * read_log("log").loss[0];
        for (size_t k = 0; k < total; k++) want[k] += share * got[k];
        remove("log");
    }
    h.seq = T;
    write_shard("shard.bin", 20240520, 1, T + 1, tokens, T + 1);
    training_flags(flags, &h, "model", "shard.bin");
    static const Layout layouts[] = {
        {"train_documents", 1, "--micro-batch 1"},
        {"train_documents", 2, "--micro-batch 1 --context 2"},
        {"train_documents", 4, "--micro-batch 1 --context 4 --context-by ring"}};
    Bounds bound = bounds(x, &ref.config);
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        if (layouts[i].ranks > max_ranks(x)) continue;
        bool ran = ok && runs(x, &layouts[i], "", "%s --log log --dump-gradients gradients",
                              flags) && read_tensors("gradients", "", &ref.table, got);
        double off = relative(read_log("log").loss[0], loss);
        Errors e = compare_tensors(&ref.table, got, want);
        check(&x->check, ran && off <= bound.loss && e.whole <= 2 * bound.gradients,
              "%d ranks, %s: loss %.1e and gradients %.1e off those of 4 documents one by one",
              layouts[i].ranks, layouts[i].flags, off, e.whole);
        remove("log");
    }
    // A trainer that takes the sequence for one document has another loss.
    Layout blind = {"train_data", 1, "--micro-batch 1"};
    bool ran = runs(x, &blind, "", "%s --log log", flags);
    double off = relative(read_log("log").loss[0], loss);
    check(&x->check, ran && off > 1e-4, "train_data's loss of the whole sequence is %.1e off", off);
    free(want), free(got), free(tokens);
    reference_free(&ref);
}

// ---- group bits ------------------------------------------------------------------------

typedef struct {
    const char *flags, *env;
} Bits;

static const Bits BITS[] = {
    {"", ""},
    {"--recompute rest", "CPU_STREAM_ORDER=random:1 NCCL_DELAY=random:1:2000"},
    {"--recompute layer", "CPU_STREAM_ORDER=random:2 CPU_THREAD_ORDER=random:2"},
    {"--overlap 0 --debug-replicas 1", "NCCL_DELAY=random:3:2000"},
};

static void group_bits(Context *x) {
    static const char *const ways[] = {"--context 4 --context-by ring",
                                       "--context 2 --context-by ulysses"};
    char flags[ARG_BYTES];
    int *tokens = documents(G * STEPS, T, 71);
    Reference ref = random_model(L, C, NH, V, T, 0.2, 72);
    Training h = TRAINING;
    h.dropout = 0.1;
    write_shard("shard.bin", 20240520, 1, G * STEPS * T + 1, tokens, G * STEPS * T + 1);
    write_model("model", &ref.table, ref.params, INTACT);
    training_flags(flags, &h, "model", "shard.bin");
    for (size_t way = 0; way < 2 && max_ranks(x) >= 4; way++) {
        Layout layout = {"train_documents", 4, ways[way]};
        bool same = true;
        for (size_t i = 0; i < sizeof BITS / sizeof *BITS && same; i++) {
            const char *out = i == 0 ? "base" : "other";
            if (on_gpu(x) && strstr(BITS[i].env, "CPU_")) continue;
            remove_tree(out);
            same = runs(x, &layout, BITS[i].env, "%s --micro-batch 2 --out %s %s", flags, out,
                        BITS[i].flags) &&
                   (i == 0 || same_checkpoint("base/step-00000002", "other/step-00000002"));
            if (!same) printf("     %s %s\n", BITS[i].flags, BITS[i].env);
        }
        check(&x->check, same,
              "%s: same bits with recomputation, without overlap, whatever the order of streams, "
              "messages and threads",
              ways[way]);
    }
    free(tokens);
    reference_free(&ref);
}

// ---- group refusals --------------------------------------------------------------------

static void group_refusals(Context *x) {
    static const struct { int d; const char *flags, *says; } rows[] = {
        {1, "--eot 257", "--eot 257 is not below the 257 tokens of the model"},
        {1, "--eot x", "--eot must be a whole number"},
        {3, "--context 3", "is not a multiple of"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        Layout layout = {"train_documents", rows[i].d, rows[i].flags};
        check_refusal(x, &layout, rows[i].flags, PLAIN,
                      "--train-data golden/train.bin --seq 16 --global-batch 6 --micro-batch 1 "
                      "--out refused",
                      2, rows[i].says);
    }
}

int main(int argc, char **argv) {
    static Context x;
    static const Group groups[] = {
        {"reference", group_reference}, {"layouts", group_layouts}, {"alone", group_alone},
        {"bits", group_bits},           {"refusals", group_refusals}};
    reference_loss = tested_loss;
    prefer_plain_kernels();
    return test_trainers(&x, groups, sizeof groups / sizeof *groups, argc, argv);
}
