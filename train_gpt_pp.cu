// train_gpt_pp.cu: train_gpt_tp.cu plus pipeline parallelism: GPipe (Huang et al. 2019), 1F1B and interleaved 1F1B
// (Narayanan et al. 2021). The third of four trainers:
//   train_gpt.cu -> train_gpt_tp.cu (tensor) -> train_gpt_pp.cu (pipeline) -> train_gpt_3d.cu (data, sharded optimizer)
//
// The layers are dealt to p stages in v chunks each: global chunk c*p + s is chunk c of stage s. A stage runs the list
// of steps that llmc/pipeline.h gives it; activations go up and gradients down over links with streams of their own.
//
// Each layer is shared by t ranks. QKV and FC are split by columns (a rank has NHl = NH/t heads, Cl = C/t of their
// channels and Fl = 4C/t hidden units), the two projections by rows, the vocabulary by rows (Vl = Vp/t). Operators f
// and g stand where the paper draws them. Under sequence parallelism layernorms, residuals and what they keep are
// cut over the Nl = N/t tokens of a rank.
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
// defines: Job, NCCL_CHECK: the ranks, and how they end together
#include "llmc/trainer/job.cuh"
// defines: Grid: rank -> coordinates
#include "llmc/grid.h"
// defines: replicas_check
#include "llmc/trainer/replicas.cuh"
// defines: pipeline_schedule, pipeline_routes: which step when, and where its input comes from
#include "llmc/pipeline.h"
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
    floatX *ln1;                   // (N, C) -> (Nl, C) under sequence parallelism; so are the others marked (Nl, C)
    float *ln1_mean, *ln1_rstd;    // (Nl)
    floatX *qkv;                   // (N, 3C) -> (N, 3Cl)
    float *saved;                  // (B, NH, T) log-sum-exp of the scores
    floatX *atty;                  // (N, C) -> (N, Cl)
    floatX *residual2;             // (Nl, C) residual stream between the two halves
    floatX *ln2;                   // (Nl, C)
    float *ln2_mean, *ln2_rstd;    // (Nl)
    floatX *fch;                   // (N, 4C) -> (N, Fl) before GELU
    floatX *fch_gelu;              // (N, 4C) -> (N, Fl)
} LayerActs;

// What the forward pass of one micro-batch through one chunk of layers keeps until its backward pass.
typedef struct {
    LayerActs *layers;             // [chunk_layers]
    floatX **residual;             // [chunk_layers + 1] of (Nl, C): input of each layer; the last is the chunk's output
    floatX *lnf;                   // (Nl, C)
    float *lnf_mean, *lnf_rstd;    // (Nl)
} Slot;

// One end of a link to a neighbouring stage: activations or gradients, sent or received. See llmc/pipeline.h.
typedef struct {
    ncclComm_t comm;               // of two ranks, 0 sends to 1; NULL: no such link
    cudaStream_t stream;
    floatX *buffer[PIPELINE_BUFFERS];      // (N * C / t): with tensor ranks each carries its part of the message
    cudaEvent_t moved[PIPELINE_BUFFERS];   // the message in the buffer has arrived, or has been sent
    cudaEvent_t ready[PIPELINE_BUFFERS];   // the buffer has been emptied, or filled, by the compute stream
    size_t count;                  // messages so far; number k uses buffer k % PIPELINE_BUFFERS
} LinkEnd;

typedef struct {
    Options opt;
    GPTConfig config;
    size_t B, T, micros;           // sequences of a micro-batch, tokens of a sequence, micro-batches of a step
    Job job;
    Grid grid;
    ncclComm_t tensor;             // the t ranks that share each layer
    ncclComm_t embedding;          // first and last stage, which both hold wte; NULL between them and with one stage
    LinkEnd receive[2], send[2];   // of activations and of gradients: indexed by StepKind
    PipelineStep *steps;           // [step_count] this stage's part of a training step
    PipelineRoute *routes;         // [step_count]
    size_t step_count;
    size_t chunks;                 // v
    size_t *chunk_first, *chunk_count;  // [chunks] its layers, in the numbering of the table
    size_t chunk_layers;           // the largest of chunk_count
    size_t Cl, NHl, Fl, Vl;        // this rank's part of C, NH, 4C and Vp
    bool sp;                       // sequence parallelism, and t > 1
    ParamTable table;
    State state;

    Slot *slots;                   // [slot_count] micro-batches in flight: the schedule says how many
    size_t slot_count;
    floatX *logits;                // (N, Vp) -> (N, Vl), then their gradient
    floatX *last_logits;           // (Vp) of one token, gathered to sample from
    float *losses;                 // (N)
    float *row_max, *row_sums;     // (N) and (2, N): maximum, sum of exponentials and target logit of each token
    float *row_max_local;          // (N) before the reduction
    double *loss_sums;             // [micros]
    int *inputs, *targets;         // (micros, N)

    floatX *proj;                  // (N, C) output of a projection before its bias and the residual are added
    floatX *reduced;               // (Nl, C) the same summed over the tensor ranks; proj itself without sp
    floatX *gathered, *dgathered;  // (N, C) with sp: what f and g's backward gather
    floatX *dresidual;             // (Nl, C) gradient of the residual stream
    floatX *dnorm;                 // (N, C) gradient of a layernorm's output, and (N, Cl) of atty
    floatX *dreduced;              // (Nl, C) the same summed over the tensor ranks; dnorm itself without sp
    floatX *dqkv;                  // (N, 3C) -> (N, 3Cl)
    floatX *dfch;                  // (N, 4C) -> (N, Fl)
    float *dattention;             // (B, NH, T) scratch
    float *reduce_scratch;         // for the two-stage column sums
    NormRange *norm_ranges;        // [norm_count] the pieces of gradient tensors that this rank owns
    size_t norm_count, *norm_ids;  // [norm_count] on the host: the tensor of each
    double *norms, *norm_scratch;  // [norm_count] squared norm of each
    double *totals, *host_totals;  // [tensors of the whole model + 1] the same summed over the ranks; and a stop flag

    int *host_inputs, *host_targets;  // (micros, N) pinned
    double *host_sums, *host_norms;   // [micros], [norm_count] pinned
    cudaStream_t stream, comm;     // compute, and the all-reduces that overlap it
    cudaEvent_t computed, reduced_ready, gathered_ready;
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

static floatX *weight(const GPT *g, TensorKind kind, size_t l) {
    return g->state.params + table_offset(&g->table, kind, l);
}

static float *gradient(const GPT *g, TensorKind kind, size_t l) {
    return g->state.grads + table_offset(&g->table, kind, l);
}

// Rows of the residual stream that this rank holds of N.
static size_t local_rows(const GPT *g, size_t N) { return g->sp ? N / (size_t)g->grid.t : N; }

// Gives every buffer its place. Recomputation shares one buffer among the layers instead of keeping one for each.
static void layout_activations(GPT *g, Arena *arena) {
    size_t N = g->B * g->T, C = g->config.C, L = g->chunk_layers;
    size_t Nl = local_rows(g, N), Cl = g->Cl, NHl = g->NHl, Fl = g->Fl, Vl = g->Vl;
    for (size_t i = 0; i < g->slot_count * L; i++) {
        Slot *slot = &g->slots[i / L];
        LayerActs *a = &slot->layers[i % L];
        slot->residual[i % L] = (floatX *)arena_take(arena, Nl * C, sizeof(floatX));
        if (i % L == L - 1) slot->residual[L] = (floatX *)arena_take(arena, Nl * C, sizeof(floatX));
        if (i > 0 && g->opt.recompute == RECOMPUTE_LAYER) {
            *a = g->slots[0].layers[0];
            continue;
        }
        a->ln1 = (floatX *)arena_take(arena, Nl * C, sizeof(floatX));
        a->ln1_mean = (float *)arena_take(arena, Nl, sizeof(float));
        a->ln1_rstd = (float *)arena_take(arena, Nl, sizeof(float));
        a->qkv = (floatX *)arena_take(arena, N * 3 * Cl, sizeof(floatX));
        a->saved = (float *)arena_take(arena, N * NHl, sizeof(float));
        a->atty = (floatX *)arena_take(arena, N * Cl, sizeof(floatX));
        a->residual2 = (floatX *)arena_take(arena, Nl * C, sizeof(floatX));
        a->ln2 = (floatX *)arena_take(arena, Nl * C, sizeof(floatX));
        a->ln2_mean = (float *)arena_take(arena, Nl, sizeof(float));
        a->ln2_rstd = (float *)arena_take(arena, Nl, sizeof(float));
        a->fch = (floatX *)arena_take(arena, N * Fl, sizeof(floatX));
        bool share_gelu = i > 0 && g->opt.recompute == RECOMPUTE_GELU;
        a->fch_gelu = share_gelu ? g->slots[0].layers[0].fch_gelu : (floatX *)arena_take(arena, N * Fl, sizeof(floatX));
    }
    for (size_t i = 0; i < g->slot_count && g->table.shard.head; i++) {
        g->slots[i].lnf = (floatX *)arena_take(arena, Nl * C, sizeof(floatX));
        g->slots[i].lnf_mean = (float *)arena_take(arena, Nl, sizeof(float));
        g->slots[i].lnf_rstd = (float *)arena_take(arena, Nl, sizeof(float));
    }
    for (int i = 0; i < 4; i++) {
        LinkEnd *end = i < 2 ? &g->receive[i] : &g->send[i - 2];
        for (int b = 0; b < PIPELINE_BUFFERS && g->grid.p > 1; b++) {
            end->buffer[b] = (floatX *)arena_take(arena, N * C / (size_t)g->grid.t, sizeof(floatX));
        }
    }
    g->logits = g->table.shard.head ? (floatX *)arena_take(arena, N * Vl, sizeof(floatX)) : NULL;
    g->last_logits = (floatX *)arena_take(arena, g->config.Vp, sizeof(floatX));
    g->losses = (float *)arena_take(arena, N, sizeof(float));
    g->row_max = (float *)arena_take(arena, N, sizeof(float));
    g->row_sums = (float *)arena_take(arena, 2 * N, sizeof(float));
    g->row_max_local = (float *)arena_take(arena, N, sizeof(float));
    g->loss_sums = (double *)arena_take(arena, g->micros, sizeof(double));
    g->inputs = (int *)arena_take(arena, g->micros * N, sizeof(int));
    g->targets = (int *)arena_take(arena, g->micros * N, sizeof(int));
    g->proj = (floatX *)arena_take(arena, N * C, sizeof(floatX));
    g->dresidual = (floatX *)arena_take(arena, Nl * C, sizeof(floatX));
    g->dnorm = (floatX *)arena_take(arena, N * C, sizeof(floatX));
    g->reduced = g->sp ? (floatX *)arena_take(arena, Nl * C, sizeof(floatX)) : g->proj;
    g->dreduced = g->sp ? (floatX *)arena_take(arena, Nl * C, sizeof(floatX)) : g->dnorm;
    g->gathered = g->sp ? (floatX *)arena_take(arena, N * C, sizeof(floatX)) : NULL;
    g->dgathered = g->sp ? (floatX *)arena_take(arena, N * C, sizeof(floatX)) : NULL;
    g->dqkv = (floatX *)arena_take(arena, N * 3 * Cl, sizeof(floatX));
    g->dfch = (floatX *)arena_take(arena, N * Fl, sizeof(floatX));
    g->dattention = (float *)arena_take(arena, N * NHl, sizeof(float));
    size_t scratch = layernorm_backward_scratch(N, C);
    if (bias_backward_scratch(N, 4 * C) > scratch) scratch = bias_backward_scratch(N, 4 * C);
    g->reduce_scratch = (float *)arena_take(arena, scratch, sizeof(float));
    g->norm_ranges = (NormRange *)arena_take(arena, g->norm_count, sizeof(NormRange));
    g->norms = (double *)arena_take(arena, g->norm_count, sizeof(double));
    size_t norm_scratch = global_norm_scratch(g->norm_count, table_largest(&g->table));
    g->norm_scratch = (double *)arena_take(arena, norm_scratch, sizeof(double));
    g->totals = (double *)arena_take(arena, count_tensors(&g->config) + 1, sizeof(double));
}

static void layout(GPT *g) {
    g->weights.used = g->gradients.used = g->optimizer.used = g->activations.used = 0;
    state_layout(&g->state, &g->weights, &g->gradients, &g->optimizer);
    layout_activations(g, &g->activations);
}

// Plans the memory and, unless this is a dry run, allocates it: everything that does not fit is said before.
static bool allocate(GPT *g, Error *err) {
    size_t L = g->chunk_layers, N = g->B * g->T;
    g->slots = (Slot *)calloc(g->slot_count, sizeof(Slot));
    for (size_t i = 0; i < g->slot_count && g->slots; i++) {
        g->slots[i].layers = (LayerActs *)calloc(L, sizeof(LayerActs));
        g->slots[i].residual = (floatX **)calloc(L + 1, sizeof(floatX *));
        if (!g->slots[i].layers || !g->slots[i].residual) return error_set(err, "out of host memory");
    }
    state_create(&g->state, &g->table, 1, 0);
    g->norm_count = state_ranges(&g->state, &g->table, NULL, NULL);
    g->norm_ids = (size_t *)malloc(g->norm_count * sizeof(size_t));
    if (!g->slots || !g->norm_ids) return error_set(err, "out of host memory");
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
    CUDA_CHECK(cudaMallocHost((void **)&g->host_totals, (count_tensors(&g->config) + 1) * sizeof(double)));
    NormRange *ranges = (NormRange *)malloc(g->norm_count * sizeof(NormRange));
    if (!ranges) return error_set(err, "out of host memory");
    state_ranges(&g->state, &g->table, ranges, g->norm_ids);
    CUDA_CHECK(cudaMemcpy(g->norm_ranges, ranges, g->norm_count * sizeof(NormRange), cudaMemcpyHostToDevice));
    free(ranges);
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward and backward

// Lets the compute stream wait for another stream's event. The span shows how long: communication that is not hidden.
static void wait_for(GPT *g, cudaEvent_t event, const char *what) {
    size_t span = span_begin(&g->timeline, g->stream, 0, what, -1, 0);
    CUDA_CHECK(cudaStreamWaitEvent(g->stream, event, 0));
    span_end(&g->timeline, g->stream, span);
}

// Operator f of the paper: identity in forward, all-reduce in backward. Under sequence parallelism its forward gathers
// the rows of all ranks, (Nl, C) -> (N, C), and its backward sums and scatters them again.
static const floatX *f_forward(GPT *g, const floatX *x, size_t N, cudaStream_t stream) {
    if (!g->sp) return x;
    size_t count = local_rows(g, N) * g->config.C;
    size_t span = span_begin(&g->timeline, stream, stream == g->comm, "all-gather", -1, 0);
    NCCL_CHECK(ncclAllGather(x, g->gathered, count, NCCL_FLOATX, g->tensor, stream));
    span_end(&g->timeline, stream, span);
    return g->gathered;
}

// Starts the sum of dnorm (N, C) over the ranks into dreduced (Nl, C), on a stream of its own: the weight gradients that
// follow on the compute stream overlap it. f_backward_end makes the compute stream wait for it.
static void f_backward_begin(GPT *g) {
    if (g->grid.t == 1) return;
    size_t count = g->B * g->T * g->config.C;
    CUDA_CHECK(cudaEventRecord(g->computed, g->stream));
    CUDA_CHECK(cudaStreamWaitEvent(g->comm, g->computed, 0));
    size_t span = span_begin(&g->timeline, g->comm, 1, g->sp ? "reduce-scatter" : "all-reduce", -1, 0);
    if (!g->sp) NCCL_CHECK(ncclAllReduce(g->dnorm, g->dnorm, count, NCCL_FLOATX, ncclSum, g->tensor, g->comm));
    else NCCL_CHECK(ncclReduceScatter(g->dnorm, g->dreduced, count / (size_t)g->grid.t, NCCL_FLOATX, ncclSum, g->tensor,
                                      g->comm));
    span_end(&g->timeline, g->comm, span);
    CUDA_CHECK(cudaEventRecord(g->reduced_ready, g->comm));
}

static void f_backward_end(GPT *g) {
    if (g->grid.t > 1) wait_for(g, g->reduced_ready, "wait tensor");
}

// Under sequence parallelism backward needs f's output again, which was not kept: gathers it beside the compute stream.
static const floatX *f_again_begin(GPT *g, const floatX *x) {
    if (!g->sp) return x;
    CUDA_CHECK(cudaEventRecord(g->computed, g->stream));
    CUDA_CHECK(cudaStreamWaitEvent(g->comm, g->computed, 0));
    f_forward(g, x, g->B * g->T, g->comm);
    CUDA_CHECK(cudaEventRecord(g->gathered_ready, g->comm));
    return g->gathered;
}

static void f_again_end(GPT *g) {
    if (g->sp) wait_for(g, g->gathered_ready, "wait tensor");
}

// Operator g: all-reduce in forward, identity in backward. Under sequence parallelism the reduce-scatter
// (N, C) -> (Nl, C), and the all-gather.
static void g_forward(GPT *g, floatX *out, const floatX *partial, size_t N) {
    if (g->grid.t == 1) return;
    size_t count = local_rows(g, N) * g->config.C;
    size_t span = span_begin(&g->timeline, g->stream, 0, g->sp ? "reduce-scatter" : "all-reduce", -1, 0);
    if (g->sp) NCCL_CHECK(ncclReduceScatter(partial, out, count, NCCL_FLOATX, ncclSum, g->tensor, g->stream));
    else NCCL_CHECK(ncclAllReduce(partial, out, count, NCCL_FLOATX, ncclSum, g->tensor, g->stream));
    span_end(&g->timeline, g->stream, span);
}

static const floatX *g_backward(GPT *g, const floatX *dresidual) {
    if (!g->sp) return dresidual;
    size_t count = local_rows(g, g->B * g->T) * g->config.C;
    size_t span = span_begin(&g->timeline, g->stream, 0, "all-gather", -1, 0);
    NCCL_CHECK(ncclAllGather(dresidual, g->dgathered, count, NCCL_FLOATX, g->tensor, g->stream));
    span_end(&g->timeline, g->stream, span);
    return g->dgathered;
}

// One layer: x (Nl, C) -> out (Nl, C).
static void layer_forward(GPT *g, size_t l, LayerActs *a, floatX *out, const floatX *x, size_t B, size_t T) {
    size_t N = B * T, C = g->config.C, Nl = local_rows(g, N), Cl = g->Cl, Fl = g->Fl;
    cudaStream_t s = g->stream;
    layernorm_forward(a->ln1, a->ln1_mean, a->ln1_rstd, x, weight(g, LN1W, l), weight(g, LN1B, l), Nl, C, s);
    const floatX *ln1 = f_forward(g, a->ln1, N, s);
    matmul_forward(&g->matmul, a->qkv, ln1, weight(g, QKVW, l), weight(g, QKVB, l), N, C, 3 * Cl);
    attention_forward(a->atty, a->saved, a->qkv, B, T, Cl, g->NHl, s);
    matmul_forward(&g->matmul, g->proj, a->atty, weight(g, PROJW, l), NULL, N, Cl, C);
    g_forward(g, g->reduced, g->proj, N);
    layernorm_residual_forward(a->residual2, a->ln2, a->ln2_mean, a->ln2_rstd, x, g->reduced, weight(g, PROJB, l),
                               weight(g, LN2W, l), weight(g, LN2B, l), Nl, C, s);
    const floatX *ln2 = f_forward(g, a->ln2, N, s);
    matmul_forward(&g->matmul, a->fch, ln2, weight(g, FCW, l), weight(g, FCB, l), N, C, Fl);
    gelu_forward(a->fch_gelu, a->fch, N * Fl, s);
    if (!out) return;  // recomputation: backward needs nothing of what follows
    matmul_forward(&g->matmul, g->proj, a->fch_gelu, weight(g, FCPROJW, l), NULL, N, Fl, C);
    g_forward(g, g->reduced, g->proj, N);
    residual_forward(out, a->residual2, g->reduced, weight(g, FCPROJB, l), Nl, C, s);
}

// One layer: dresidual (Nl, C) is the gradient of its output and becomes that of its input x. Weight gradients are
// written by the first micro-batch and added to by the others (accumulate).
static void layer_backward(GPT *g, size_t l, LayerActs *a, const floatX *x, bool accumulate) {
    size_t B = g->B, T = g->T, N = B * T, C = g->config.C, Nl = local_rows(g, N), Cl = g->Cl, Fl = g->Fl;
    cudaStream_t s = g->stream;
    floatX *dresidual = g->dresidual;
    if (g->opt.recompute == RECOMPUTE_LAYER) layer_forward(g, l, a, NULL, x, B, T);
    if (g->opt.recompute == RECOMPUTE_GELU) gelu_forward(a->fch_gelu, a->fch, N * Fl, s);
    // the MLP
    const floatX *dout = g_backward(g, dresidual);
    const floatX *ln2 = f_again_begin(g, a->ln2);
    matmul_backward_input(&g->matmul, g->dfch, dout, weight(g, FCPROJW, l), N, Fl, C);
    matmul_backward_weight(&g->matmul, gradient(g, FCPROJW, l), a->fch_gelu, dout, N, Fl, C, accumulate);
    bias_backward(gradient(g, FCPROJB, l), dout, g->reduce_scratch, N, C, accumulate, s);
    gelu_backward(g->dfch, g->dfch, a->fch, N * Fl, s);
    matmul_backward_input(&g->matmul, g->dnorm, g->dfch, weight(g, FCW, l), N, C, Fl);
    f_backward_begin(g);
    f_again_end(g);
    matmul_backward_weight(&g->matmul, gradient(g, FCW, l), ln2, g->dfch, N, C, Fl, accumulate);
    bias_backward(gradient(g, FCB, l), g->dfch, g->reduce_scratch, N, Fl, accumulate, s);
    f_backward_end(g);
    layernorm_backward(dresidual, gradient(g, LN2W, l), gradient(g, LN2B, l), g->reduce_scratch, dresidual, g->dreduced,
                       a->residual2, weight(g, LN2W, l), a->ln2_mean, a->ln2_rstd, Nl, C, accumulate, s);
    // the attention
    dout = g_backward(g, dresidual);
    const floatX *ln1 = f_again_begin(g, a->ln1);
    matmul_backward_input(&g->matmul, g->dnorm, dout, weight(g, PROJW, l), N, Cl, C);
    matmul_backward_weight(&g->matmul, gradient(g, PROJW, l), a->atty, dout, N, Cl, C, accumulate);
    bias_backward(gradient(g, PROJB, l), dout, g->reduce_scratch, N, C, accumulate, s);
    attention_backward(g->dqkv, g->dattention, g->dnorm, a->atty, a->saved, a->qkv, B, T, Cl, g->NHl, s);
    matmul_backward_input(&g->matmul, g->dnorm, g->dqkv, weight(g, QKVW, l), N, C, 3 * Cl);
    f_backward_begin(g);
    f_again_end(g);
    matmul_backward_weight(&g->matmul, gradient(g, QKVW, l), ln1, g->dqkv, N, C, 3 * Cl, accumulate);
    bias_backward(gradient(g, QKVB, l), g->dqkv, g->reduce_scratch, N, 3 * Cl, accumulate, s);
    f_backward_end(g);
    layernorm_backward(dresidual, gradient(g, LN1W, l), gradient(g, LN1B, l), g->reduce_scratch, dresidual, g->dreduced,
                       x, weight(g, LN1W, l), a->ln1_mean, a->ln1_rstd, Nl, C, accumulate, s);
}

// Enqueues the receipt of x (Nl, C) of B*T = N tokens from the neighbour: activations or gradients. Of t tensor ranks each
// gets 1/t from its counterpart and all gather (the scatter/gather optimisation); under sequence parallelism x is 1/t.
static void link_receive(GPT *g, StepKind kind, floatX *x, size_t N, int micro, int chunk) {
    LinkEnd *end = &g->receive[kind];
    size_t b = end->count++ % PIPELINE_BUFFERS, count = N * g->config.C / (size_t)g->grid.t;
    CUDA_CHECK(cudaStreamWaitEvent(end->stream, end->ready[b], 0));
    size_t span = span_begin(&g->timeline, end->stream, 2 + 2 * kind, "recv", micro, chunk);
    NCCL_CHECK(ncclRecv(end->buffer[b], count, NCCL_FLOATX, 0, end->comm, end->stream));
    span_end(&g->timeline, end->stream, span);
    CUDA_CHECK(cudaEventRecord(end->moved[b], end->stream));
    wait_for(g, end->moved[b], "wait pipeline");
    if (g->sp || g->grid.t == 1) {
        CUDA_CHECK(cudaMemcpyAsync(x, end->buffer[b], count * sizeof(floatX), cudaMemcpyDeviceToDevice, g->stream));
    } else {
        NCCL_CHECK(ncclAllGather(end->buffer[b], x, count, NCCL_FLOATX, g->tensor, g->stream));
    }
    CUDA_CHECK(cudaEventRecord(end->ready[b], g->stream));
}

// Enqueues the sending of x to the neighbour; x may be overwritten by what is enqueued later.
static void link_send(GPT *g, StepKind kind, const floatX *x, size_t N, int micro, int chunk) {
    LinkEnd *end = &g->send[kind];
    size_t b = end->count++ % PIPELINE_BUFFERS, count = N * g->config.C / (size_t)g->grid.t;
    const floatX *mine = g->sp ? x : x + (size_t)g->grid.t_rank * count;
    wait_for(g, end->moved[b], "wait pipeline");
    CUDA_CHECK(cudaMemcpyAsync(end->buffer[b], mine, count * sizeof(floatX), cudaMemcpyDeviceToDevice, g->stream));
    CUDA_CHECK(cudaEventRecord(end->ready[b], g->stream));
    CUDA_CHECK(cudaStreamWaitEvent(end->stream, end->ready[b], 0));
    size_t span = span_begin(&g->timeline, end->stream, 3 + 2 * kind, "send", micro, chunk);
    NCCL_CHECK(ncclSend(end->buffer[b], count, NCCL_FLOATX, 1, end->comm, end->stream));
    span_end(&g->timeline, end->stream, span);
    CUDA_CHECK(cudaEventRecord(end->moved[b], end->stream));
}

// The chunk that starts from tokens, and the one that ends in the loss.
static bool is_first(const GPT *g, int chunk) { return g->table.shard.embedding && chunk == 0; }
static bool is_last(const GPT *g, int chunk) { return g->table.shard.head && (size_t)chunk == g->chunks - 1; }

// One chunk: tokens (B, T), or what the previous chunk sends -> lnf (Nl, C), or what the next chunk gets. A rank looks up
// the tokens of its part of the vocabulary, tensor rank 0 adds the positions.
static void forward(GPT *g, Slot *slot, const int *inputs, size_t B, size_t T, int micro, int chunk) {
    size_t C = g->config.C, L = g->chunk_count[chunk], first = g->chunk_first[chunk];
    if (!is_first(g, chunk)) link_receive(g, STEP_FORWARD, slot->residual[0], B * T, micro, chunk);
    size_t span = span_begin(&g->timeline, g->stream, 0, "forward", micro, chunk);
    if (is_first(g, chunk)) {
        floatX *encoded = g->sp ? g->proj : slot->residual[0];
        encoder_forward(encoded, inputs, weight(g, WTE, 0), g->grid.t_rank == 0 ? weight(g, WPE, 0) : NULL, B, T, C,
                        (size_t)g->grid.t_rank * g->Vl, g->Vl, g->stream);
        g_forward(g, slot->residual[0], encoded, B * T);
    }
    for (size_t l = 0; l < L; l++) {
        layer_forward(g, first + l, &slot->layers[l], slot->residual[l + 1], slot->residual[l], B, T);
    }
    if (is_last(g, chunk)) {
        layernorm_forward(slot->lnf, slot->lnf_mean, slot->lnf_rstd, slot->residual[L], weight(g, LNFW, 0),
                          weight(g, LNFB, 0), local_rows(g, B * T), C, g->stream);
    }
    span_end(&g->timeline, g->stream, span);
    if (!is_last(g, chunk)) link_send(g, STEP_FORWARD, slot->residual[L], B * T, micro, chunk);
}

// lnf (Nl, C) -> the micro-batch's sum of losses; logits become the gradient of the step's mean loss if wanted. Every
// rank has the logits of its part of the vocabulary; only three numbers a token travel: maximum, sum, target logit.
static void loss(GPT *g, Slot *slot, const int *targets, int micro, bool want_gradient) {
    size_t N = g->B * g->T, C = g->config.C, V = g->config.V, Vl = g->Vl, v_start = (size_t)g->grid.t_rank * Vl;
    float *sum = g->row_sums, *target = g->row_sums + N;
    float dloss = (float)(1.0 / ((double)g->opt.global_batch * (double)g->T));
    size_t span = span_begin(&g->timeline, g->stream, 0, "loss", micro, 0);
    head_forward(&g->matmul, g->logits, f_forward(g, slot->lnf, N, g->stream), weight(g, WTE, 0), N, C, Vl);
    classifier_stats(g->row_max_local, sum, target, g->logits, targets, N, V, Vl, v_start, g->stream);
    NCCL_CHECK(ncclAllReduce(g->row_max_local, g->row_max, N, ncclFloat, ncclMax, g->tensor, g->stream));
    classifier_rescale(sum, g->row_max_local, g->row_max, N, g->stream);
    NCCL_CHECK(ncclAllReduce(g->row_sums, g->row_sums, 2 * N, ncclFloat, ncclSum, g->tensor, g->stream));
    classifier_gradient(g->losses, g->logits, g->row_max, sum, target, targets, dloss, N, V, Vl, v_start, want_gradient,
                        g->stream);
    loss_sum(&g->loss_sums[micro], g->losses, N, g->stream);
    span_end(&g->timeline, g->stream, span);
}

// One chunk, after loss() or from the gradient that the next chunk sends.
static void backward(GPT *g, Slot *slot, const int *inputs, int micro, int chunk) {
    size_t B = g->B, T = g->T, N = B * T, C = g->config.C, Vl = g->Vl;
    size_t L = g->chunk_count[chunk], first = g->chunk_first[chunk];
    bool accumulate = micro > 0;
    if (!is_last(g, chunk)) link_receive(g, STEP_BACKWARD, g->dresidual, N, micro, chunk);
    size_t span = span_begin(&g->timeline, g->stream, 0, "backward", micro, chunk);
    if (is_last(g, chunk)) {
        const floatX *lnf = f_again_begin(g, slot->lnf);
        head_backward_input(&g->matmul, g->dnorm, g->logits, weight(g, WTE, 0), N, C, Vl);
        f_backward_begin(g);
        f_again_end(g);
        head_backward_weight(&g->matmul, gradient(g, WTE, 0), lnf, g->logits, N, C, Vl, accumulate);
        f_backward_end(g);
        layernorm_backward(g->dresidual, gradient(g, LNFW, 0), gradient(g, LNFB, 0), g->reduce_scratch, NULL,
                           g->dreduced, slot->residual[L], weight(g, LNFW, 0), slot->lnf_mean, slot->lnf_rstd,
                           local_rows(g, N), C, accumulate, g->stream);
    }
    for (size_t l = L; l-- > 0;) layer_backward(g, first + l, &slot->layers[l], slot->residual[l], accumulate);
    if (is_first(g, chunk)) {
        encoder_backward(gradient(g, WTE, 0), gradient(g, WPE, 0), g_backward(g, g->dresidual), inputs, B, T, C,
                         g->config.maxT, (size_t)g->grid.t_rank * Vl, Vl, accumulate, g->stream);
    }
    span_end(&g->timeline, g->stream, span);
    if (!is_first(g, chunk)) link_send(g, STEP_BACKWARD, g->dresidual, N, micro, chunk);
}

// Runs this stage's list of steps: all of a training step, or its forwards alone to validate. The host only enqueues.
static void run_steps(GPT *g, bool training) {
    size_t N = g->B * g->T;
    for (size_t i = 0; i < g->step_count; i++) {
        PipelineStep step = g->steps[i];
        Slot *slot = &g->slots[training ? g->routes[i].slot : 0];
        const int *inputs = g->inputs + (size_t)step.micro * N, *targets = g->targets + (size_t)step.micro * N;
        bool at_loss = is_last(g, step.chunk);
        if (step.kind == STEP_FORWARD) forward(g, slot, inputs, g->B, g->T, step.micro, step.chunk);
        // The logits are made when their gradient is due: one buffer serves all micro-batches in flight.
        if (at_loss && (step.kind == STEP_BACKWARD) == training) loss(g, slot, targets, step.micro, training);
        if (step.kind == STEP_BACKWARD && training) backward(g, slot, inputs, step.micro, step.chunk);
    }
}

// First and last stage hold the tied embedding and saw its two uses: the sum is the gradient, and both need it.
static void reduce_embedding(GPT *g) {
    if (!g->embedding) return;
    float *dwte = gradient(g, WTE, 0);
    NCCL_CHECK(ncclAllReduce(dwte, dwte, table_find(&g->table, WTE, 0)->size, ncclFloat, ncclSum, g->embedding, g->stream));
}

// Under sequence parallelism a rank's layernorm gradients cover its own tokens: their sum over the ranks is the gradient.
// Sums those that stand in elements [lo, hi) of the flat buffer.
static void reduce_layernorms(GPT *g, size_t lo, size_t hi) {
    if (!g->sp) return;
    NCCL_CHECK(ncclGroupStart());
    for (size_t i = 0; i < g->table.count; i++) {
        const Tensor *x = &g->table.tensors[i];
        bool in_layer = x->kind == LN1W || x->kind == LN1B || x->kind == LN2W || x->kind == LN2B;
        if ((!in_layer && x->kind < LNFW) || x->offset < lo || x->offset >= hi) continue;
        float *dx = g->state.grads + x->offset;
        NCCL_CHECK(ncclAllReduce(dx, dx, x->size, ncclFloat, ncclSum, g->tensor, g->stream));
    }
    NCCL_CHECK(ncclGroupEnd());
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

// Sums host doubles over all ranks, through the device. Synchronises.
static void all_reduce_host(GPT *g, double *x, size_t count) {
    CUDA_CHECK(cudaMemcpyAsync(g->totals, x, count * sizeof(double), cudaMemcpyHostToDevice, g->stream));
    NCCL_CHECK(ncclAllReduce(g->totals, g->totals, count, ncclDouble, ncclSum, g->job.world, g->stream));
    CUDA_CHECK(cudaMemcpyAsync(x, g->totals, count * sizeof(double), cudaMemcpyDeviceToHost, g->stream));
    CUDA_CHECK(cudaStreamSynchronize(g->stream));
}

// Mean loss per token over `sequences` sequences from the loss sums on the device. Synchronises.
static double mean_loss(GPT *g, size_t micros, size_t sequences) {
    size_t bytes = micros * sizeof(double);
    if (g->table.shard.head) {
        CUDA_CHECK(cudaMemcpyAsync(g->host_sums, g->loss_sums, bytes, cudaMemcpyDeviceToHost, g->stream));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    double sum = 0.0;
    for (size_t i = 0; i < micros && g->table.shard.head && g->grid.t_rank == 0; i++) sum += g->host_sums[i];
    all_reduce_host(g, &sum, 1);  // all other ranks add 0
    return sum / ((double)sequences * (double)g->T);
}

// Global gradient norm: squares are summed per tensor in double on the device and added here in the table's order.
// A tensor that all tensor ranks or two stages hold is counted once. bad becomes the name of the first tensor whose gradient is not
// finite, or "". If any rank has been asked to stop, all of them learn of it here.
static double gradient_norm(GPT *g, char bad[40]) {
    size_t count = g->norm_count, tensors = count_tensors(&g->config);
    double sum = 0.0;
    global_norm_squared(g->norms, g->norm_scratch, g->state.grads, g->norm_ranges, count, table_largest(&g->table),
                        g->stream);
    CUDA_CHECK(cudaMemcpyAsync(g->host_norms, g->norms, count * sizeof(double), cudaMemcpyDeviceToHost, g->stream));
    CUDA_CHECK(cudaStreamSynchronize(g->stream));
    memset(g->host_totals, 0, tensors * sizeof(double));
    g->host_totals[tensors] = stop_signal != 0;
    for (size_t i = 0; i < count; i++) {
        Tensor x = tensor_by_id(&g->config, g->norm_ids[i]);
        bool ours = (x.split != SPLIT_NONE || g->grid.t_rank == 0) && (x.kind != WTE || g->table.shard.embedding);
        if (ours) g->host_totals[g->norm_ids[i]] += g->host_norms[i];
    }
    all_reduce_host(g, g->host_totals, tensors + 1);
    bad[0] = '\0';
    for (size_t i = 0; i < tensors; i++) {
        if (!isfinite(g->host_totals[i]) && !bad[0]) strcpy(bad, tensor_by_id(&g->config, i).name);
        sum += g->host_totals[i];
    }
    g->stop = g->host_totals[tensors] > 0.0;
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
    if (g->job.rank == 0 && !gradients_create(path, &g->config, err)) return false;
    MPI_Barrier(MPI_COMM_WORLD);
    if (!state_dump_gradients(&g->state, &g->table, path, g->table.shard.embedding, err)) return false;
    MPI_Barrier(MPI_COMM_WORLD);
    return g->job.rank != 0 || gradients_finish(path, err);
}

// --debug-replicas: what several ranks hold must stay the same bits on all of them.
static bool check_replicas(GPT *g, Error *err) {
    return replicas_check(&g->state, &g->table, REPLICAS_UNSPLIT, g->tensor, "tensor", g->stream, err) &&
           (!g->embedding || replicas_check(&g->state, &g->table, REPLICAS_TIED, g->embedding, "embedding", g->stream, err));
}

// Forward, backward and update over one global batch.
static StepReport train_step(GPT *g) {
    Error err;
    StepReport report;
    memset(&report, 0, sizeof report);
    size_t step = g->progress.step;
    timeline_collect(&g->timeline, 0);  // of what ran between the steps
    g->timeline.paused = step >= g->progress.first_step + g->opt.trace_steps;
    double begin = seconds_now();
    if (!load_batch(g, &g->train_data, g->progress.sample, g->opt.global_batch, g->opt.shuffle, &err)) job_fail(&g->job, &err);
    if (g->embedding) {  // the head's gradient writes wte's, the encoder's adds to it
        CUDA_CHECK(cudaMemsetAsync(gradient(g, WTE, 0), 0, table_find(&g->table, WTE, 0)->size * sizeof(float), g->stream));
    }
    run_steps(g, true);
    reduce_embedding(g);
    reduce_layernorms(g, 0, g->table.total);
    char bad[40];
    report.step = step + 1;
    report.grad_norm = gradient_norm(g, bad);
    report.loss = mean_loss(g, g->micros, g->opt.global_batch);
    report.lr = learning_rate((LRSchedule)g->opt.lr_schedule, step, g->opt.warmup, g->opt.steps, g->opt.lr, g->opt.lr_final);
    if (!isfinite(report.loss) || bad[0]) {
        error_set(&err, "step %zu: the loss is %g and %s is the first tensor whose gradient is not finite; nothing was "
                  "updated; resume from the last checkpoint with a lower --lr", step + 1, report.loss, bad[0] ? bad : "none");
        job_stop(&g->job, &err);
    }
    if (g->opt.dump_gradients && step == g->progress.first_step && !dump_gradients(g, &err)) job_fail(&g->job, &err);
    update(g, report.lr, report.grad_norm);
    CUDA_CHECK(cudaDeviceSynchronize());
    if (g->opt.debug_replicas && !check_replicas(g, &err)) job_fail(&g->job, &err);
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
    size_t G = g->opt.global_batch, batches = g->val_data.samples / G;
    if (batches > g->opt.val_batches) batches = g->opt.val_batches;
    double sum = 0.0;
    for (size_t batch = 0; batch < batches; batch++) {
        if (!load_batch(g, &g->val_data, batch * G, G, false, &err)) job_fail(&g->job, &err);
        run_steps(g, false);
        sum += mean_loss(g, g->micros, G);
    }
    return sum / (double)batches;
}

// Prints the prompt and its continuation: one forward pass over the last T tokens for each new token.
static void sample(GPT *g) {
    Error err;
    size_t C = g->config.C, V = g->config.V, Vp = g->config.Vp, count = 0, limit = g->opt.sample_tokens;
    int *tokens;
    if (!tokenizer_prompt(&g->tokenizer, g->opt.prompt, limit, V, &tokens, &count, &err)) job_fail(&g->job, &err);
    float *logits = (float *)malloc(Vp * sizeof(float));
    if (!logits) { fprintf(stderr, "error: out of host memory\n"); exit(1); }
    printf("sample: ");
    for (size_t i = 0; i < count; i++) tokenizer_print(&g->tokenizer, tokens[i]);
    for (size_t i = 0; i < limit; i++) {
        size_t T = count < g->T ? count : g->T;
        memcpy(g->host_inputs, tokens + count - T, T * sizeof(int));
        CUDA_CHECK(cudaMemcpyAsync(g->inputs, g->host_inputs, T * sizeof(int), cudaMemcpyHostToDevice, g->stream));
        size_t padded = round_up(T, g->sp ? (size_t)g->grid.t : 1);  // what is behind T does not change what is before
        CUDA_CHECK(cudaMemsetAsync(g->inputs + T, 0, (padded - T) * sizeof(int), g->stream));
        for (size_t chunk = 0; chunk < g->chunks; chunk++) forward(g, &g->slots[0], g->inputs, 1, padded, -1, (int)chunk);
        if (g->table.shard.head) {
            const floatX *lnf = f_forward(g, g->slots[0].lnf, padded, g->stream);
            head_forward(&g->matmul, g->logits, lnf + (T - 1) * C, weight(g, WTE, 0), 1, C, g->Vl);
            NCCL_CHECK(ncclAllGather(g->logits, g->last_logits, g->Vl, NCCL_FLOATX, g->tensor, g->stream));
        }
        int root = grid_rank_at(&g->grid, 0, 0, g->grid.p - 1);
        NCCL_CHECK(ncclBroadcast(g->last_logits, g->last_logits, Vp, NCCL_FLOATX, root, g->job.world, g->stream));
        CUDA_CHECK(cudaDeviceSynchronize());
        state_download(logits, g->last_logits, 0, Vp, true);
        double coin = random_uniform(g->opt.seed, RANDOM_SAMPLE, g->progress.step, 0, i);
        tokens[count] = sample_token(logits, V, SAMPLE_TEMPERATURE, coin);
        tokenizer_print(&g->tokenizer, tokens[count++]);
    }
    printf("\n");
    free(logits);
    free(tokens);
}

// Rank 0 makes the files, every rank writes its own slices into them, rank 0 gives the folder its name.
static bool save(GPT *g, Error *err) {
    char tmp[PATH_MAX] = "", path[PATH_MAX];
    bool bf16 = sizeof(floatX) != sizeof(float), first = g->job.rank == 0;
    if (first && !checkpoint_create(g->opt.out, g->progress.step, &g->config, bf16, tmp, sizeof tmp, err)) return false;
    MPI_Bcast(tmp, sizeof tmp, MPI_CHAR, 0, MPI_COMM_WORLD);
    bool saved = state_save(&g->state, &g->table, tmp, g->table.shard.embedding, err);
    if (saved) MPI_Barrier(MPI_COMM_WORLD);
    if (!saved || (first && !checkpoint_commit(tmp, &g->progress, path, sizeof path, err))) {
        checkpoint_abandon(tmp);
        return false;
    }
    if (!first) return true;
    checkpoint_prune(g->opt.out, g->opt.keep, g->progress.step);
    printf("saved %s\n", path);
    fflush(stdout);
    return true;
}

// What the timeline saw: a table of where the time went (--profile), and the Chrome trace (--trace).
static bool report_timeline(GPT *g, Error *err) {
    static const char *const tracks[] = {"compute", "all-reduce", "receive activations", "send activations",
                                         "receive gradients", "send gradients"};
    TraceList all;
    if (!job_gather_trace(&g->job, &g->timeline.trace, &all)) return true;  // rank 0 has the events of all ranks
    if (g->opt.profile) profile_report(all.events, all.count, g->job.size, g->progress.first_step);
    bool ok = !g->opt.trace || trace_write(g->opt.trace, all.events, all.count, tracks, 6, err);
    trace_free(&all);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

// Deals the layers to this stage's chunks, makes its parameter table and its list of steps.
static bool plan_pipeline(GPT *g, Error *err) {
    size_t L = g->config.L, v = g->opt.chunks, n = 0;
    int p = g->grid.p, stage = g->grid.p_rank, m = (int)g->micros;
    Schedule schedule = (Schedule)g->opt.schedule;
    if (!pipeline_check(schedule, p, m, (int)v, err)) return false;
    g->step_count = pipeline_schedule(schedule, p, stage, m, (int)v, NULL);
    size_t *layers = (size_t *)malloc(L * sizeof(size_t));
    g->chunks = v;
    g->chunk_first = (size_t *)malloc(v * sizeof(size_t));
    g->chunk_count = (size_t *)malloc(v * sizeof(size_t));
    g->steps = (PipelineStep *)malloc(g->step_count * sizeof(PipelineStep));
    g->routes = (PipelineRoute *)malloc(g->step_count * sizeof(PipelineRoute));
    if (!layers || !g->chunk_first || !g->chunk_count || !g->steps || !g->routes) return error_set(err, "out of host memory");
    for (size_t c = 0; c < v; c++) {
        size_t chunk = c * (size_t)p + (size_t)stage, first = stage_first_layer(L, v * (size_t)p, chunk);
        g->chunk_first[c] = n;
        g->chunk_count[c] = stage_layer_count(L, v * (size_t)p, chunk);
        if (g->chunk_count[c] > g->chunk_layers) g->chunk_layers = g->chunk_count[c];
        for (size_t i = 0; i < g->chunk_count[c]; i++) layers[n++] = first + i;
    }
    Shard shard = {(size_t)g->grid.t, (size_t)g->grid.t_rank, stage == 0, stage == p - 1, n, layers, 0};
    g->table = table_make(&g->config, &shard);
    free(layers);
    pipeline_schedule(schedule, p, stage, m, (int)v, g->steps);
    g->slot_count = pipeline_routes(p, stage, m, (int)v, g->steps, g->step_count, g->routes);
    return g->slot_count > 0 ? true : error_set(err, "out of host memory");
}

// Everything that can be refused is refused here, before any work: exit code 2.
static bool prepare(GPT *g, int argc, char **argv, Error *err) {
    Options *o = &g->opt;
    if (!options_parse(o, argc, argv, OPTIONS_TENSOR | OPTIONS_PIPELINE, err)) return false;
    if (o->help) {
        options_help(stdout, argv[0], OPTIONS_TENSOR | OPTIONS_PIPELINE);
        MPI_Finalize();
        exit(0);
    }
    // Where the weights come from: a checkpoint to resume, a folder to start from, or random numbers.
    static char latest[PATH_MAX];
    if (o->resume && strcmp(o->resume, "auto") == 0) {
        if (!o->out) return error_set(err, "--resume auto needs --out");
        bool found = g->job.rank != 0 || checkpoint_latest(o->out, latest, sizeof latest, err);
        MPI_Bcast(latest, sizeof latest, MPI_CHAR, 0, MPI_COMM_WORLD);  // all ranks take the same one
        if (!found) return false;
        o->resume = latest[0] ? latest : NULL;  // none yet: a fresh start
        if (o->resume) o->init = NULL;          // a requeued job goes on from where it stands
    }
    const char *from = o->resume ? o->resume : o->init;
    GPTConfig file;
    if (from && !checkpoint_read_config(from, &file, err)) return false;
    if (!options_resolve(o, from ? &file : NULL, (size_t)g->job.size, err)) return false;
    if (!grid_make(&g->grid, g->job.size, g->job.rank, (int)o->tensor, 1, (int)o->pipeline, "tdp", err)) return false;
    if (!job_check_devices(&g->job, err)) return false;
    g->config = options_config(o);
    if (from && !checkpoint_check(from, &g->config, o->resume != NULL, sizeof(floatX) == 2, err)) return false;
    g->B = o->micro_batch;
    g->T = o->seq;
    g->micros = o->global_batch / o->micro_batch;
    if (!plan_pipeline(g, err)) return false;
    size_t t = o->tensor;
    g->Cl = g->config.C / t;
    g->NHl = g->config.NH / t;
    g->Fl = 4 * g->config.C / t;
    g->Vl = g->config.Vp / t;
    g->sp = o->sequence_parallel && t > 1;
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
    bool write_log = g->job.rank == 0 && !o->dry_run;
    return log_open(&g->log, write_log ? o->log : NULL, g->progress.step, o->steps, tokens, count_flops(&g->config, tokens, g->T),
                    g->job.size * device_peak_flops(g->device.name, sizeof(floatX) == 2), err);
}

static void print_configuration(const GPT *g) {
    const GPTConfig *c = &g->config;
    printf("device       %s, %s\n", g->device.name, FLOATX_NAME);
    printf("model        %zu layers, %zu heads, %zu channels, vocabulary %zu (padded to %zu), %zu positions: %zu "
           "parameters\n", c->L, c->NH, c->C, c->V, c->Vp, c->maxT, count_parameters(c));
    printf("batch        %zu sequences of %zu tokens a step, in %zu micro-batches of %zu\n", g->opt.global_batch, g->T,
           g->micros, g->B);
    grid_print(stdout, &g->grid);
}

// The communicators of the links, two ranks each, and of the tied embedding. All ranks split in the same order.
static void connect_stages(GPT *g) {
    int p = g->grid.p, stage = g->grid.p_rank, from, to;
    for (int link = 0; link < pipeline_link_count(p); link++) {
        if (!pipeline_link_ends(p, (int)g->chunks, link, &from, &to)) continue;
        bool sends = stage == from, at_end = sends || stage == to;
        StepKind kind = link < p ? STEP_FORWARD : STEP_BACKWARD;
        LinkEnd *end = sends ? &g->send[kind] : &g->receive[kind];
        ncclComm_t comm;
        job_split(&g->job, at_end ? grid_color(&g->grid, 'p') : -1, sends ? 0 : 1, "pipeline", &comm);
        if (!at_end) continue;
        end->comm = comm;
        CUDA_CHECK(cudaStreamCreateWithFlags(&end->stream, cudaStreamNonBlocking));
        for (int b = 0; b < PIPELINE_BUFFERS; b++) {
            CUDA_CHECK(cudaEventCreateWithFlags(&end->moved[b], cudaEventDisableTiming));
            CUDA_CHECK(cudaEventCreateWithFlags(&end->ready[b], cudaEventDisableTiming));
        }
    }
    if (p == 1) return;
    job_split(&g->job, grid_color(&g->grid, 'e'), grid_key(&g->grid, 'e'), "embedding", &g->embedding);
}

static void connect(GPT *g) {
    job_connect(&g->job);
    job_split(&g->job, grid_color(&g->grid, 't'), grid_key(&g->grid, 't'), "tensor", &g->tensor);
    connect_stages(g);
    CUDA_CHECK(cudaStreamCreateWithFlags(&g->comm, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&g->computed, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&g->reduced_ready, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&g->gathered_ready, cudaEventDisableTiming));
}

int main(int argc, char **argv) {
    static GPT context;
    GPT *g = &context;
    Error err;
    const Options *o = &g->opt;
    job_start(&g->job, &argc, &argv);
    CUDA_CHECK(cudaGetDeviceProperties(&g->device, g->job.device));
    job_agree(&g->job, prepare(g, argc, argv, &err), &err);
    print_configuration(g);
    job_agree(&g->job, allocate(g, &err), &err);
    if (o->dry_run) {
        return job_dry_run(&g->job, g->weights.used, g->gradients.used, g->optimizer.used, g->activations.used);
    }
    connect(g);
    CUDA_CHECK(cudaStreamCreateWithFlags(&g->stream, cudaStreamNonBlocking));
    matmul_create(&g->matmul, g->stream);
    timeline_start(&g->timeline, o->trace || o->profile, g->job.rank, g->stream);
    const char *from = o->resume ? o->resume : o->init;
    if (!from) state_init_weights(&g->state, &g->table, o->seed);
    else if (!state_load(&g->state, &g->table, from, o->resume != NULL, &err)) job_fail(&g->job, &err);
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
        if (o->out && (last ? moved || !o->resume : due && moved) && !save(g, &err)) job_fail(&g->job, &err);
        if (last) break;
        StepReport report = train_step(g);
        log_step(&g->log, &report);
    }
    if (g->stop && o->out && g->progress.step > g->progress.first_step && !save(g, &err)) job_fail(&g->job, &err);
    if (g->stop) printf("stopped by a signal after step %zu\n", g->progress.step);
    if (o->profile) CUDA_CHECK(cudaProfilerStop());
    if ((o->trace || o->profile) && !report_timeline(g, &err)) job_fail(&g->job, &err);
    if (!log_close(&g->log, &err)) job_fail(&g->job, &err);
    for (int i = 0; i < 4; i++) {
        LinkEnd *end = i < 2 ? &g->receive[i] : &g->send[i - 2];
        if (end->comm) NCCL_CHECK(ncclCommDestroy(end->comm));
    }
    if (g->embedding) NCCL_CHECK(ncclCommDestroy(g->embedding));
    NCCL_CHECK(ncclCommDestroy(g->tensor));
    job_finish(&g->job);
    return 0;
}
