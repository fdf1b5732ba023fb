// train_gpt.cu: trains GPT-2 on one GPU, or on none. The first of four trainers, each the one before plus one idea:
//   train_gpt.cu -> train_gpt_tp.cu (tensor) -> train_gpt_pp.cu (pipeline) -> train_gpt_3d.cu (data, sharded optimizer)
//
// Letters: B micro-batch (sequences), T sequence length, N = B*T tokens, C channels, L layers, NH heads, V vocabulary,
// Vp the same padded to a multiple of 128. A shape stands behind every pointer. Weights are [in, out], as in
// Hugging Face's GPT-2.

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cuda_profiler_api.h>
#include <cuda_runtime.h>

// defines: LAUNCH, CUDA_CHECK, floatX
#include "llmc/kernels/cuda_common.cuh"
// defines: GPTConfig, ParamTable, table_offset
#include "llmc/model.h"
// defines: Options, options_parse
#include "llmc/host/options.h"
// defines: DataLoader
#include "llmc/host/dataloader.h"
// defines: tokenizer_encode, tokenizer_decode
#include "llmc/host/tokenizer.h"
// defines: sample_token
#include "llmc/host/sampler.h"
// defines: learning_rate
#include "llmc/host/lr.h"
// defines: the console line and the JSON Lines log
#include "llmc/host/log.h"
// defines: progress_start, progress_resume, out_check_file
#include "llmc/host/progress.h"
// defines: Arena: one allocation per purpose
#include "llmc/trainer/arena.h"
// defines: State: weights, gradients and moments; init, load, save
#include "llmc/trainer/state.cuh"
// defines: Timeline: spans for --trace and --profile
#include "llmc/trainer/timeline.cuh"
// defines: profile_report: where the time of a step went
#include "llmc/host/profile.h"
// the kernels
#include "llmc/kernels/attention.cuh"
#include "llmc/kernels/classifier.cuh"
#include "llmc/kernels/encoder.cuh"
#include "llmc/kernels/gelu.cuh"
#include "llmc/kernels/global_norm.cuh"
#include "llmc/kernels/layernorm.cuh"
#include "llmc/kernels/matmul.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// The model and its memory

// What the forward pass of one layer keeps for its backward pass.
typedef struct {
    floatX *ln1;                   // (N, C)
    float *ln1_mean, *ln1_rstd;    // (N)
    floatX *qkv;                   // (N, 3C)
    float *saved;                  // (B, NH, T) log-sum-exp of the scores
    floatX *atty;                  // (N, C)
    floatX *residual2;             // (N, C) residual stream between the two halves
    floatX *ln2;                   // (N, C)
    float *ln2_mean, *ln2_rstd;    // (N)
    floatX *fch;                   // (N, 4C) before GELU
    floatX *fch_gelu;              // (N, 4C)
} LayerActs;

typedef struct {
    Options opt;
    GPTConfig config;
    size_t B, T, micros;           // sequences of a micro-batch, tokens of a sequence, micro-batches of a step
    ParamTable table;
    State state;

    LayerActs *layers;             // [L]
    floatX **residual;             // [L + 1] of (N, C): input of layer l; the last is the input of ln_f
    floatX *lnf;                   // (N, C)
    float *lnf_mean, *lnf_rstd;    // (N)
    floatX *logits;                // (N, Vp), then their gradient
    float *losses;                 // (N)
    double *loss_sums;             // [micros]
    int *inputs, *targets;         // (micros, N)

    floatX *proj;                  // (N, C) output of a projection before its bias and the residual are added
    floatX *dresidual;             // (N, C) gradient of the residual stream
    floatX *dnorm;                 // (N, C) gradient of a layernorm's output, and of atty
    floatX *dqkv;                  // (N, 3C)
    floatX *dfch;                  // (N, 4C)
    float *dattention;             // (B, NH, T) scratch
    float *reduce_scratch;         // for the two-stage column sums
    NormRange *norm_ranges;        // [norm_count] the pieces of gradient tensors that this rank owns
    size_t norm_count, *norm_ids;  // [norm_count] on the host: the tensor of each
    double *norms, *norm_scratch;  // [norm_count] squared norm of each

    int *host_inputs, *host_targets;  // (micros, N) pinned
    double *host_sums, *host_norms;   // [micros], [norm_count] pinned
    cudaStream_t stream;
    Matmul matmul;
    Arena weights, gradients, optimizer, activations;  // the device's allocations
    Timeline timeline;
    DataLoader train_data, val_data;
    Tokenizer tokenizer;
    TrainerState progress;         // steps done, next sample
    bool stop;                     // asked to save and leave
    Log log;
    struct cudaDeviceProp device;
} GPT;

static const double SAMPLE_TEMPERATURE = 0.8;
static volatile sig_atomic_t stop_signal = 0;  // SIGTERM or SIGINT: save and leave after this step

static void on_signal(int number) { stop_signal = number; }

// Bad input before any work: one sentence, exit code 2. Later: exit code 1.
static void leave(int code, const Error *err) {
    fprintf(stderr, "error: %s\n", err->text);
    exit(code);
}

static floatX *weight(const GPT *g, TensorKind kind, size_t l) {
    return g->state.params + table_offset(&g->table, kind, l);
}

static float *gradient(const GPT *g, TensorKind kind, size_t l) {
    return g->state.grads + table_offset(&g->table, kind, l);
}

// Gives every buffer its place. Recomputation shares one buffer among the layers instead of keeping one for each.
static void layout_activations(GPT *g, Arena *arena) {
    size_t N = g->B * g->T, C = g->config.C, L = g->config.L, NH = g->config.NH, Vp = g->config.Vp;
    for (size_t l = 0; l < L; l++) {
        LayerActs *a = &g->layers[l];
        g->residual[l] = (floatX *)arena_take(arena, N * C, sizeof(floatX));
        if (l > 0 && g->opt.recompute == RECOMPUTE_LAYER) {
            *a = g->layers[0];
            continue;
        }
        a->ln1 = (floatX *)arena_take(arena, N * C, sizeof(floatX));
        a->ln1_mean = (float *)arena_take(arena, N, sizeof(float));
        a->ln1_rstd = (float *)arena_take(arena, N, sizeof(float));
        a->qkv = (floatX *)arena_take(arena, N * 3 * C, sizeof(floatX));
        a->saved = (float *)arena_take(arena, N * NH, sizeof(float));
        a->atty = (floatX *)arena_take(arena, N * C, sizeof(floatX));
        a->residual2 = (floatX *)arena_take(arena, N * C, sizeof(floatX));
        a->ln2 = (floatX *)arena_take(arena, N * C, sizeof(floatX));
        a->ln2_mean = (float *)arena_take(arena, N, sizeof(float));
        a->ln2_rstd = (float *)arena_take(arena, N, sizeof(float));
        a->fch = (floatX *)arena_take(arena, N * 4 * C, sizeof(floatX));
        bool share_gelu = l > 0 && g->opt.recompute == RECOMPUTE_GELU;
        a->fch_gelu = share_gelu ? g->layers[0].fch_gelu : (floatX *)arena_take(arena, N * 4 * C, sizeof(floatX));
    }
    g->residual[L] = (floatX *)arena_take(arena, N * C, sizeof(floatX));
    g->lnf = (floatX *)arena_take(arena, N * C, sizeof(floatX));
    g->lnf_mean = (float *)arena_take(arena, N, sizeof(float));
    g->lnf_rstd = (float *)arena_take(arena, N, sizeof(float));
    g->logits = (floatX *)arena_take(arena, N * Vp, sizeof(floatX));
    g->losses = (float *)arena_take(arena, N, sizeof(float));
    g->loss_sums = (double *)arena_take(arena, g->micros, sizeof(double));
    g->inputs = (int *)arena_take(arena, g->micros * N, sizeof(int));
    g->targets = (int *)arena_take(arena, g->micros * N, sizeof(int));
    g->proj = (floatX *)arena_take(arena, N * C, sizeof(floatX));
    g->dresidual = (floatX *)arena_take(arena, N * C, sizeof(floatX));
    g->dnorm = (floatX *)arena_take(arena, N * C, sizeof(floatX));
    g->dqkv = (floatX *)arena_take(arena, N * 3 * C, sizeof(floatX));
    g->dfch = (floatX *)arena_take(arena, N * 4 * C, sizeof(floatX));
    g->dattention = (float *)arena_take(arena, N * NH, sizeof(float));
    size_t scratch = layernorm_backward_scratch(N, C);
    if (bias_backward_scratch(N, 4 * C) > scratch) scratch = bias_backward_scratch(N, 4 * C);
    g->reduce_scratch = (float *)arena_take(arena, scratch, sizeof(float));
    g->norm_ranges = (NormRange *)arena_take(arena, g->norm_count, sizeof(NormRange));
    g->norms = (double *)arena_take(arena, g->norm_count, sizeof(double));
    size_t norm_scratch = global_norm_scratch(g->norm_count, table_largest(&g->table));
    g->norm_scratch = (double *)arena_take(arena, norm_scratch, sizeof(double));
}

static void layout(GPT *g) {
    g->weights.used = g->gradients.used = g->optimizer.used = g->activations.used = 0;
    state_layout(&g->state, &g->weights, &g->gradients, &g->optimizer);
    layout_activations(g, &g->activations);
}

// Plans the memory and, unless this is a dry run, allocates it: everything that does not fit is said before.
static bool allocate(GPT *g, Error *err) {
    size_t L = g->config.L, N = g->B * g->T;
    g->layers = (LayerActs *)calloc(L, sizeof(LayerActs));
    g->residual = (floatX **)calloc(L + 1, sizeof(floatX *));
    state_create(&g->state, &g->table, 1, 0);
    g->norm_count = state_ranges(&g->state, &g->table, NULL, NULL);
    g->norm_ids = (size_t *)malloc(g->norm_count * sizeof(size_t));
    if (!g->layers || !g->residual || !g->norm_ids) return error_set(err, "out of host memory");
    layout(g);  // counts
    struct { Arena *arena; const char *purpose; } plan[] = {
        {&g->weights, "weights"}, {&g->gradients, "gradients"}, {&g->optimizer, "optimizer"},
        {&g->activations, "activations"}};
    size_t needed = 0, free_bytes, total_bytes;
    for (int i = 0; i < 4; i++) {
        printf("%-12s %12.1f MiB\n", plan[i].purpose, (double)plan[i].arena->used / 1048576.0);
        needed += plan[i].arena->used;
    }
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    if (needed > free_bytes) {
        return error_set(err, "does not fit: %.0f MiB are needed and %.0f MiB are free on the device; lower "
                         "--micro-batch or --seq, or use --recompute layer",
                         (double)needed / 1048576.0, (double)free_bytes / 1048576.0);
    }
    if (g->opt.dry_run) return true;
    for (int i = 0; i < 4; i++) {
        if (!cuda_allocate((void **)&plan[i].arena->base, plan[i].arena->used, plan[i].purpose, err)) return false;
    }
    layout(g);  // points
    CUDA_CHECK(cudaMallocHost((void **)&g->host_inputs, g->micros * N * sizeof(int)));
    CUDA_CHECK(cudaMallocHost((void **)&g->host_targets, g->micros * N * sizeof(int)));
    CUDA_CHECK(cudaMallocHost((void **)&g->host_sums, g->micros * sizeof(double)));
    CUDA_CHECK(cudaMallocHost((void **)&g->host_norms, g->norm_count * sizeof(double)));
    NormRange *ranges = (NormRange *)malloc(g->norm_count * sizeof(NormRange));
    if (!ranges) return error_set(err, "out of host memory");
    state_ranges(&g->state, &g->table, ranges, g->norm_ids);
    CUDA_CHECK(cudaMemcpy(g->norm_ranges, ranges, g->norm_count * sizeof(NormRange), cudaMemcpyHostToDevice));
    free(ranges);
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward and backward

// One layer: x (B*T, C) -> out (B*T, C).
static void layer_forward(GPT *g, size_t l, floatX *out, const floatX *x, size_t B, size_t T) {
    size_t N = B * T, C = g->config.C, NH = g->config.NH;
    cudaStream_t s = g->stream;
    LayerActs *a = &g->layers[l];
    layernorm_forward(a->ln1, a->ln1_mean, a->ln1_rstd, x, weight(g, LN1W, l), weight(g, LN1B, l), N, C, s);
    matmul_forward(&g->matmul, a->qkv, a->ln1, weight(g, QKVW, l), weight(g, QKVB, l), N, C, 3 * C);
    attention_forward(a->atty, a->saved, a->qkv, B, T, C, NH, s);
    matmul_forward(&g->matmul, g->proj, a->atty, weight(g, PROJW, l), NULL, N, C, C);
    layernorm_residual_forward(a->residual2, a->ln2, a->ln2_mean, a->ln2_rstd, x, g->proj, weight(g, PROJB, l),
                               weight(g, LN2W, l), weight(g, LN2B, l), N, C, s);
    matmul_forward(&g->matmul, a->fch, a->ln2, weight(g, FCW, l), weight(g, FCB, l), N, C, 4 * C);
    gelu_forward(a->fch_gelu, a->fch, N * 4 * C, s);
    if (!out) return;  // recomputation: backward needs nothing of what follows
    matmul_forward(&g->matmul, g->proj, a->fch_gelu, weight(g, FCPROJW, l), NULL, N, 4 * C, C);
    residual_forward(out, a->residual2, g->proj, weight(g, FCPROJB, l), N, C, s);
}

// One layer: dresidual (N, C) is the gradient of its output and becomes that of its input x. Weight gradients are
// written by the first micro-batch and added to by the others (accumulate).
static void layer_backward(GPT *g, size_t l, const floatX *x, bool accumulate) {
    size_t B = g->B, T = g->T, N = B * T, C = g->config.C, NH = g->config.NH;
    cudaStream_t s = g->stream;
    LayerActs *a = &g->layers[l];
    floatX *dresidual = g->dresidual;
    if (g->opt.recompute == RECOMPUTE_LAYER) layer_forward(g, l, NULL, x, B, T);
    if (g->opt.recompute == RECOMPUTE_GELU) gelu_forward(a->fch_gelu, a->fch, N * 4 * C, s);
    // the MLP
    matmul_backward_input(&g->matmul, g->dfch, dresidual, weight(g, FCPROJW, l), N, 4 * C, C);
    matmul_backward_weight(&g->matmul, gradient(g, FCPROJW, l), a->fch_gelu, dresidual, N, 4 * C, C, accumulate);
    bias_backward(gradient(g, FCPROJB, l), dresidual, g->reduce_scratch, N, C, accumulate, s);
    gelu_backward(g->dfch, g->dfch, a->fch, N * 4 * C, s);
    matmul_backward_input(&g->matmul, g->dnorm, g->dfch, weight(g, FCW, l), N, C, 4 * C);
    matmul_backward_weight(&g->matmul, gradient(g, FCW, l), a->ln2, g->dfch, N, C, 4 * C, accumulate);
    bias_backward(gradient(g, FCB, l), g->dfch, g->reduce_scratch, N, 4 * C, accumulate, s);
    layernorm_backward(dresidual, gradient(g, LN2W, l), gradient(g, LN2B, l), g->reduce_scratch, dresidual, g->dnorm,
                       a->residual2, weight(g, LN2W, l), a->ln2_mean, a->ln2_rstd, N, C, accumulate, s);
    // the attention
    matmul_backward_input(&g->matmul, g->dnorm, dresidual, weight(g, PROJW, l), N, C, C);
    matmul_backward_weight(&g->matmul, gradient(g, PROJW, l), a->atty, dresidual, N, C, C, accumulate);
    bias_backward(gradient(g, PROJB, l), dresidual, g->reduce_scratch, N, C, accumulate, s);
    attention_backward(g->dqkv, g->dattention, g->dnorm, a->atty, a->saved, a->qkv, B, T, C, NH, s);
    matmul_backward_input(&g->matmul, g->dnorm, g->dqkv, weight(g, QKVW, l), N, C, 3 * C);
    matmul_backward_weight(&g->matmul, gradient(g, QKVW, l), a->ln1, g->dqkv, N, C, 3 * C, accumulate);
    bias_backward(gradient(g, QKVB, l), g->dqkv, g->reduce_scratch, N, 3 * C, accumulate, s);
    layernorm_backward(dresidual, gradient(g, LN1W, l), gradient(g, LN1B, l), g->reduce_scratch, dresidual, g->dnorm,
                       x, weight(g, LN1W, l), a->ln1_mean, a->ln1_rstd, N, C, accumulate, s);
}

// Tokens (B, T) -> lnf (B*T, C).
static void forward(GPT *g, const int *inputs, size_t B, size_t T, int micro) {
    size_t C = g->config.C, L = g->config.L;
    size_t span = span_begin(&g->timeline, g->stream, 0, "forward", micro, 0);
    encoder_forward(g->residual[0], inputs, weight(g, WTE, 0), weight(g, WPE, 0), B, T, C, 0, g->config.Vp, g->stream);
    for (size_t l = 0; l < L; l++) layer_forward(g, l, g->residual[l + 1], g->residual[l], B, T);
    layernorm_forward(g->lnf, g->lnf_mean, g->lnf_rstd, g->residual[L], weight(g, LNFW, 0), weight(g, LNFB, 0), B * T, C,
                      g->stream);
    span_end(&g->timeline, g->stream, span);
}

// lnf (N, C) -> the micro-batch's sum of losses; logits become the gradient of the step's mean loss if wanted.
static void loss(GPT *g, const int *targets, int micro, bool want_gradient) {
    size_t N = g->B * g->T, C = g->config.C, V = g->config.V, Vp = g->config.Vp;
    float dloss = (float)(1.0 / ((double)g->opt.global_batch * (double)g->T));
    size_t span = span_begin(&g->timeline, g->stream, 0, "loss", micro, 0);
    head_forward(&g->matmul, g->logits, g->lnf, weight(g, WTE, 0), N, C, Vp);
    classifier_fused(g->losses, g->logits, targets, dloss, N, V, Vp, want_gradient, g->stream);
    loss_sum(&g->loss_sums[micro], g->losses, N, g->stream);
    span_end(&g->timeline, g->stream, span);
}

static void backward(GPT *g, const int *inputs, int micro) {
    size_t B = g->B, T = g->T, N = B * T, C = g->config.C, L = g->config.L, Vp = g->config.Vp;
    bool accumulate = micro > 0;
    size_t span = span_begin(&g->timeline, g->stream, 0, "backward", micro, 0);
    head_backward_input(&g->matmul, g->dnorm, g->logits, weight(g, WTE, 0), N, C, Vp);
    head_backward_weight(&g->matmul, gradient(g, WTE, 0), g->lnf, g->logits, N, C, Vp, accumulate);
    layernorm_backward(g->dresidual, gradient(g, LNFW, 0), gradient(g, LNFB, 0), g->reduce_scratch, NULL, g->dnorm,
                       g->residual[L], weight(g, LNFW, 0), g->lnf_mean, g->lnf_rstd, N, C, accumulate, g->stream);
    for (size_t l = L; l-- > 0;) layer_backward(g, l, g->residual[l], accumulate);
    encoder_backward(gradient(g, WTE, 0), gradient(g, WPE, 0), g->dresidual, inputs, B, T, C, g->config.maxT, 0, Vp,
                     accumulate, g->stream);
    span_end(&g->timeline, g->stream, span);
}

// ---------------------------------------------------------------------------------------------------------------------
// One training step

// Reads sequences first .. first + count of a data set into rows 0 .. count of the host buffers, then to the device.
static bool load_batch(GPT *g, DataLoader *data, uint64_t first, size_t count, bool shuffle, Error *err) {
    for (size_t i = 0; i < count; i++) {
        if (!dataloader_read(data, first + i, shuffle, g->opt.seed, g->config.V, g->host_inputs + i * g->T,
                             g->host_targets + i * g->T, err)) return false;
    }
    size_t bytes = count * g->T * sizeof(int);
    CUDA_CHECK(cudaMemcpyAsync(g->inputs, g->host_inputs, bytes, cudaMemcpyHostToDevice, g->stream));
    CUDA_CHECK(cudaMemcpyAsync(g->targets, g->host_targets, bytes, cudaMemcpyHostToDevice, g->stream));
    return true;
}

// Mean loss per token over `sequences` sequences from the loss sums on the device. Synchronises.
static double mean_loss(GPT *g, size_t micros, size_t sequences) {
    size_t bytes = micros * sizeof(double);
    CUDA_CHECK(cudaMemcpyAsync(g->host_sums, g->loss_sums, bytes, cudaMemcpyDeviceToHost, g->stream));
    CUDA_CHECK(cudaStreamSynchronize(g->stream));
    double sum = 0.0;
    for (size_t i = 0; i < micros; i++) sum += g->host_sums[i];
    return sum / ((double)sequences * (double)g->T);
}

// Global gradient norm: squares are summed per tensor in double on the device and added here in the table's order.
// bad becomes the name of the first tensor whose gradient is not finite, or "".
static double gradient_norm(GPT *g, char bad[40]) {
    size_t count = g->norm_count;
    double sum = 0.0;
    global_norm_squared(g->norms, g->norm_scratch, g->state.grads, g->norm_ranges, count, table_largest(&g->table),
                        g->stream);
    CUDA_CHECK(cudaMemcpyAsync(g->host_norms, g->norms, count * sizeof(double), cudaMemcpyDeviceToHost, g->stream));
    CUDA_CHECK(cudaStreamSynchronize(g->stream));
    bad[0] = '\0';
    for (size_t i = 0; i < count; i++) {
        if (!isfinite(g->host_norms[i]) && !bad[0]) strcpy(bad, tensor_by_id(&g->config, g->norm_ids[i]).name);
        sum += g->host_norms[i];
    }
    g->stop = stop_signal != 0;
    return sqrt(sum);
}

static void update(GPT *g, double lr, double norm) {
    const Options *o = &g->opt;
    double t = (double)g->progress.step + 1.0;
    AdamW h;
    h.lr = (float)lr;
    h.beta1 = (float)o->beta1;
    h.beta2 = (float)o->beta2;
    h.eps = (float)o->eps;
    h.weight_decay = 0.0f;
    h.beta1_correction = (float)(1.0 - pow(o->beta1, t));
    h.beta2_correction = (float)(1.0 - pow(o->beta2, t));
    h.grad_scale = o->clip > 0.0 && norm > o->clip ? (float)(o->clip / norm) : 1.0f;
    size_t span = span_begin(&g->timeline, g->stream, 0, "optimizer", -1, 0);
    state_adamw(&g->state, &g->table, h, (float)o->weight_decay, g->stream);
    span_end(&g->timeline, g->stream, span);
}

// Writes this step's gradients, before clipping, as one unsharded file.
static bool dump_gradients(GPT *g, Error *err) {
    const char *path = g->opt.dump_gradients;
    return gradients_create(path, &g->config, err) && state_dump_gradients(&g->state, &g->table, path, true, err) &&
           gradients_finish(path, err);
}

// Forward, backward and update over one global batch.
static StepReport train_step(GPT *g) {
    Error err;
    StepReport report;
    memset(&report, 0, sizeof report);
    size_t N = g->B * g->T, step = g->progress.step;
    timeline_collect(&g->timeline, 0);  // of what ran between the steps
    g->timeline.paused = step >= g->progress.first_step + g->opt.trace_steps;
    double begin = seconds_now();
    if (!load_batch(g, &g->train_data, g->progress.sample, g->opt.global_batch, g->opt.shuffle, &err)) leave(1, &err);
    for (size_t micro = 0; micro < g->micros; micro++) {
        forward(g, g->inputs + micro * N, g->B, g->T, (int)micro);
        loss(g, g->targets + micro * N, (int)micro, true);
        backward(g, g->inputs + micro * N, (int)micro);
    }
    char bad[40];
    report.step = step + 1;
    report.grad_norm = gradient_norm(g, bad);
    report.loss = mean_loss(g, g->micros, g->opt.global_batch);
    report.lr = learning_rate((LRSchedule)g->opt.lr_schedule, step, g->opt.warmup, g->opt.steps, g->opt.lr, g->opt.lr_final);
    if (!isfinite(report.loss) || bad[0]) {
        error_set(&err, "step %zu: the loss is %g and %s is the first tensor whose gradient is not finite; nothing was "
                  "updated; resume from the last checkpoint with a lower --lr", step + 1, report.loss, bad[0] ? bad : "none");
        leave(1, &err);
    }
    if (g->opt.dump_gradients && step == g->progress.first_step && !dump_gradients(g, &err)) leave(1, &err);
    update(g, report.lr, report.grad_norm);
    CUDA_CHECK(cudaStreamSynchronize(g->stream));
    timeline_collect(&g->timeline, step + 1);
    g->progress.step++;
    g->progress.sample += g->opt.global_batch;
    report.ms = 1e3 * (seconds_now() - begin);
    return report;
}

// ---------------------------------------------------------------------------------------------------------------------
// Between the steps: validation, samples, checkpoints

// Mean loss over the first val_batches global batches of the validation data, always the same and in order.
static double validate(GPT *g) {
    Error err;
    size_t N = g->B * g->T, G = g->opt.global_batch, batches = g->val_data.samples / G;
    if (batches > g->opt.val_batches) batches = g->opt.val_batches;
    double sum = 0.0;
    for (size_t batch = 0; batch < batches; batch++) {
        if (!load_batch(g, &g->val_data, batch * G, G, false, &err)) leave(1, &err);
        for (size_t micro = 0; micro < g->micros; micro++) {
            forward(g, g->inputs + micro * N, g->B, g->T, (int)micro);
            loss(g, g->targets + micro * N, (int)micro, false);
        }
        sum += mean_loss(g, g->micros, G);
    }
    return sum / (double)batches;
}

// Prints the prompt and its continuation: one forward pass over the last T tokens for each new token.
static void sample(GPT *g) {
    Error err;
    size_t C = g->config.C, V = g->config.V, Vp = g->config.Vp, count = 0, limit = g->opt.sample_tokens;
    int *tokens;
    if (!tokenizer_prompt(&g->tokenizer, g->opt.prompt, limit, V, &tokens, &count, &err)) leave(1, &err);
    float *logits = (float *)malloc(Vp * sizeof(float));
    if (!logits) { fprintf(stderr, "error: out of host memory\n"); exit(1); }
    printf("sample: ");
    for (size_t i = 0; i < count; i++) tokenizer_print(&g->tokenizer, tokens[i]);
    for (size_t i = 0; i < limit; i++) {
        size_t T = count < g->T ? count : g->T;
        memcpy(g->host_inputs, tokens + count - T, T * sizeof(int));
        CUDA_CHECK(cudaMemcpyAsync(g->inputs, g->host_inputs, T * sizeof(int), cudaMemcpyHostToDevice, g->stream));
        forward(g, g->inputs, 1, T, -1);
        head_forward(&g->matmul, g->logits, g->lnf + (T - 1) * C, weight(g, WTE, 0), 1, C, Vp);
        CUDA_CHECK(cudaStreamSynchronize(g->stream));
        state_download(logits, g->logits, 0, Vp, true);
        double coin = random_uniform(g->opt.seed, RANDOM_SAMPLE, g->progress.step, 0, i);
        tokens[count] = sample_token(logits, V, SAMPLE_TEMPERATURE, coin);
        tokenizer_print(&g->tokenizer, tokens[count++]);
    }
    printf("\n");
    free(logits);
    free(tokens);
}

static bool save(GPT *g, Error *err) {
    char tmp[PATH_MAX], path[PATH_MAX];
    bool bf16 = sizeof(floatX) != sizeof(float);
    if (!checkpoint_create(g->opt.out, g->progress.step, &g->config, bf16, tmp, sizeof tmp, err)) return false;
    if (!state_save(&g->state, &g->table, tmp, true, err) ||
        !checkpoint_commit(tmp, &g->progress, path, sizeof path, err)) {
        checkpoint_abandon(tmp);
        return false;
    }
    checkpoint_prune(g->opt.out, g->opt.keep, g->progress.step);
    printf("saved %s\n", path);
    fflush(stdout);
    return true;
}

// What the timeline saw: a table of where the time went (--profile), and the Chrome trace (--trace).
static bool report_timeline(GPT *g, Error *err) {
    static const char *const tracks[] = {"compute"};
    TraceList *all = &g->timeline.trace;
    if (g->opt.profile) profile_report(all->events, all->count, 1, g->progress.first_step);
    return !g->opt.trace || trace_write(g->opt.trace, all->events, all->count, tracks, 1, err);
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

// Everything that can be refused is refused here, before any work: exit code 2.
static bool prepare(GPT *g, int argc, char **argv, Error *err) {
    Options *o = &g->opt;
    if (!options_parse(o, argc, argv, 0, err)) return false;
    if (o->help) {
        options_help(stdout, argv[0], 0);
        exit(0);
    }
    // Where the weights come from: a checkpoint to resume, a folder to start from, or random numbers.
    static char latest[PATH_MAX];
    if (o->resume && strcmp(o->resume, "auto") == 0) {
        if (!o->out) return error_set(err, "--resume auto needs --out");
        if (!checkpoint_latest(o->out, latest, sizeof latest, err)) return false;
        o->resume = latest[0] ? latest : NULL;  // none yet: a fresh start
        if (o->resume) o->init = NULL;          // a requeued job goes on from where it stands
    }
    const char *from = o->resume ? o->resume : o->init;
    GPTConfig file;
    if (from && !checkpoint_read_config(from, &file, err)) return false;
    if (!options_resolve(o, from ? &file : NULL, 1, err)) return false;
    g->config = options_config(o);
    if (from && !checkpoint_check(from, &g->config, o->resume != NULL, sizeof(floatX) == 2, err)) return false;
    g->B = o->micro_batch;
    g->T = o->seq;
    g->micros = o->global_batch / o->micro_batch;
    g->table = table_make_whole(&g->config);
    g->progress = progress_start(o, sizeof(floatX) == 2);
    if (o->resume && !progress_resume(&g->progress, o->resume, err)) return false;
    // Data and outputs
    if (o->train_data && (!dataloader_open(&g->train_data, o->train_data, g->T, err) ||
                          !dataloader_check_batch(&g->train_data, o->global_batch, err))) return false;
    if (o->val_every && (!dataloader_open(&g->val_data, o->val_data, g->T, err) ||
                         !dataloader_check_batch(&g->val_data, o->global_batch, err))) return false;
    static char beside[PATH_MAX];
    if (!o->tokenizer && from && path_print(beside, sizeof beside, err, "%s/tokenizer.json", from) &&
        access(beside, R_OK) == 0) o->tokenizer = beside;
    if (!tokenizer_open(&g->tokenizer, o->tokenizer, err)) return false;
    if (o->out && !folder_check_writable(o->out, err)) return false;
    if (!out_check_file("--trace", o->trace, err)) return false;
    if (!out_check_file("--dump-gradients", o->dump_gradients, err)) return false;
    double tokens = (double)o->global_batch * (double)g->T;
    return log_open(&g->log, o->dry_run ? NULL : o->log, g->progress.step, o->steps, tokens, count_flops(&g->config, tokens, g->T),
                    device_peak_flops(g->device.name, sizeof(floatX) == 2), err);
}

static void print_configuration(const GPT *g) {
    const GPTConfig *c = &g->config;
    printf("device       %s, %s\n", g->device.name, FLOATX_NAME);
    printf("model        %zu layers, %zu heads, %zu channels, vocabulary %zu (padded to %zu), %zu positions: %zu "
           "parameters\n", c->L, c->NH, c->C, c->V, c->Vp, c->maxT, count_parameters(c));
    printf("batch        %zu sequences of %zu tokens a step, in %zu micro-batches of %zu\n", g->opt.global_batch, g->T,
           g->micros, g->B);
}

int main(int argc, char **argv) {
    static GPT context;
    GPT *g = &context;
    Error err;
    const Options *o = &g->opt;
    CUDA_CHECK(cudaGetDeviceProperties(&g->device, 0));
    if (!prepare(g, argc, argv, &err)) leave(2, &err);
    print_configuration(g);
    if (!allocate(g, &err)) leave(2, &err);
    if (o->dry_run) return 0;
    CUDA_CHECK(cudaStreamCreateWithFlags(&g->stream, cudaStreamNonBlocking));
    matmul_create(&g->matmul, g->stream);
    timeline_start(&g->timeline, o->trace || o->profile, 0, g->stream);
    const char *from = o->resume ? o->resume : o->init;
    if (!from) state_init_weights(&g->state, &g->table, o->seed);
    else if (!state_load(&g->state, &g->table, from, o->resume != NULL, &err)) leave(1, &err);
    CUDA_CHECK(cudaDeviceSynchronize());  // memory is set on the default stream, which ours do not wait for
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    signal(SIGXFSZ, SIG_IGN);  // a file that grows too large is an error of the write, with a sentence
    if (o->profile) CUDA_CHECK(cudaProfilerStart());

    // The training loop: what is due after `step` updates, then one more update.
    while (!g->stop) {
        size_t step = g->progress.step;
        bool last = step >= o->steps, moved = step > g->progress.first_step;
        if (o->val_every && (moved || !o->resume) && (step % o->val_every == 0 || last)) {
            log_validation(&g->log, step, validate(g));
        }
        if (o->sample_every && ((moved && step % o->sample_every == 0) || last)) sample(g);
        bool due = o->save_every && step % o->save_every == 0;
        if (o->out && (last ? moved || !o->resume : due && moved) && !save(g, &err)) leave(1, &err);
        if (last) break;
        StepReport report = train_step(g);
        log_step(&g->log, &report);
    }
    if (g->stop && o->out && g->progress.step > g->progress.first_step && !save(g, &err)) leave(1, &err);
    if (g->stop) printf("stopped by a signal after step %zu\n", g->progress.step);
    if (o->profile) CUDA_CHECK(cudaProfilerStop());
    if ((o->trace || o->profile) && !report_timeline(g, &err)) leave(1, &err);
    if (!log_close(&g->log, &err)) leave(1, &err);
    return 0;
}
