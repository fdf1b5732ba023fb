// train_gpt_tp.cu: train_gpt.cu plus tensor parallelism (Shoeybi et al. 2019, "Megatron-LM"), and with
// --sequence-parallel 1 sequence parallelism (Korthikanti et al. 2022). The second of four trainers.
//
// Each layer is shared by t ranks. QKV and FC are split by columns, the two projections and the vocabulary by rows.
// Operators f and g stand where the paper draws them. Under sequence parallelism layernorms and residuals are cut by
// rows: Nl = N/t.
//
// Letters: B micro-batch (sequences), T sequence length, N = B*T tokens, C channels, L layers, NH heads, V vocabulary,
// Vp the same padded to 128. A rank has Nl rows of the residual stream, A channels of heads, F hidden units, Vl of Vp.
// A shape stands behind every pointer. Weights are [in, out]: w[QKVW] is one of a layer, dw[QKVW] its gradient
// (llmc/model.h). A rank of t has A = C/t, F = 4C/t, Vl = Vp/t.

// Trainer: everything but the mathematics: options, memory, data, optimizer, checkpoints, log, timeline
#include "llmc/trainer/ranks.cuh"  // with trainer.cuh
#include "llmc/kernels/attention.cuh"
#include "llmc/kernels/classifier.cuh"
#include "llmc/kernels/encoder.cuh"
#include "llmc/kernels/gelu.cuh"
#include "llmc/kernels/layernorm.cuh"
#include "llmc/kernels/matmul.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// The model and its memory

// Activations of one layer: its forward pass keeps them for its backward pass.
struct LayerActs {
    Layernorm ln1;                 // (Nl, C), with mean and rstd (Nl)
    floatX *qkv;                   // (N, 3A)
    float *lse;                    // (B, NH, T) of attention: log-sum-exp of the scores
    floatX *atty;                  // (N, A)
    floatX *residual2;             // (Nl, C) residual stream between the two halves
    Layernorm ln2;                 // (Nl, C)
    floatX *fch, *fch_gelu;        // (N, F) before and after GELU
};

// Activations of one micro-batch, kept from its forward to its backward pass.
struct Acts {
    LayerActs *layers;             // [L]
    floatX **residual;             // [L + 1] of (Nl, C): input of layer l; the last is the input of ln_f
    Layernorm lnf;                 // (Nl, C)
};

struct GPT : Trainer {
    ncclComm_t tensor;             // the t ranks that share each layer
    cudaStream_t comm;             // of the collectives that overlap compute
    cudaEvent_t computed, reduced_ready, gathered_ready;

    Acts acts;                     // of the current micro-batch
    floatX *logits;                // (N, Vl), then their gradient
    float *row_max, *row_sums;     // (N) and (2, N): maximum, sum of exponentials and target logit of each token
    float *row_max_local;          // (N) of this rank's part of the vocabulary
    floatX *last_logits;           // (Vp) of one token, gathered to sample from
    floatX *proj;                  // (N, C) output of a projection; in backward the masked gradient with dropout
    floatX *reduced;               // (Nl, C) the same, summed over the tensor ranks: proj itself with Nl = N
    floatX *dresidual;             // (Nl, C) gradient of the residual stream
    floatX *dnorm;                 // (N, C) gradient of a layernorm's output, and (N, A) of atty
    floatX *dreduced;              // (Nl, C) the same, summed over the tensor ranks: dnorm itself with Nl = N
    floatX *gathered, *dgathered;  // (N, C) under sequence parallelism: outputs of f, and of g's backward
    floatX *dqkv;                  // (N, 3A)
    floatX *dfch;                  // (N, F)
    float *dattention;             // (B, NH, T) scratch
    float *reduce_scratch;         // for the two-stage column sums
};

// Takes this rank's part of every layer and of the vocabulary.
static void shard(GPT *m) {
    size_t t = m->grid.t;
    trainer_sizes(m, t), m->V0 = m->grid.t_rank * m->Vl;
    if (m->opt.sequence_parallel) m->sp = t;
    Shard part = shard_whole(&m->config);
    part.t = t, part.t_rank = m->grid.t_rank;
    trainer_shard(m, part);
}

// Takes memory for the activations of one micro-batch. With recomputation the layers share those of the first one.
static void layout_acts(GPT *m, Arena *arena, Acts *acts) {
    size_t N = m->B * m->T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F, L = m->config.L;
    host_array(acts->layers, L), host_array(acts->residual, L + 1);
    for (size_t l = 0; l <= L; l++) take(arena, acts->residual[l], Nl * C);
    for (size_t l = 0; l < L; l++) {
        LayerActs *a = &acts->layers[l], *first = &m->acts.layers[0];
        int again = a == first ? RECOMPUTE_NONE : m->opt.recompute;  // what backward computes again
        *a = *first;
        if (again < RECOMPUTE_LAYER) take(arena, a->lse, N * m->NHl), take(arena, a->atty, N * A);
        if (again < RECOMPUTE_GELU) take(arena, a->fch_gelu, N * F);
        if (again >= RECOMPUTE_BUT_ATTENTION) continue;
        take_layernorm(arena, &a->ln1, Nl, C), take_layernorm(arena, &a->ln2, Nl, C);
        take(arena, a->qkv, N * 3 * A), take(arena, a->residual2, Nl * C), take(arena, a->fch, N * F);
    }
    take_layernorm(arena, &acts->lnf, Nl, C);
}

// Takes memory for every buffer: called once to count bytes, and once to set pointers.
static void layout(GPT *m) {
    size_t N = m->B * m->T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F;
    Arena *arena = trainer_layout(m);
    take(arena, m->logits, N * m->Vl);
    take(arena, m->row_max, N), take(arena, m->row_sums, 2 * N);
    take(arena, m->proj, N * C), take(arena, m->dresidual, Nl * C), take(arena, m->dnorm, N * C);
    m->reduced = m->proj, m->dreduced = m->dnorm;
    take(arena, m->row_max_local, N), take(arena, m->last_logits, m->config.Vp);
    if (m->sp > 1) {
        take(arena, m->reduced, Nl * C), take(arena, m->dreduced, Nl * C);
        take(arena, m->gathered, N * C), take(arena, m->dgathered, N * C);
    }
    take(arena, m->dqkv, N * 3 * A), take(arena, m->dfch, N * F), take(arena, m->dattention, N * m->NHl);
    take(arena, m->reduce_scratch, reduce_scratch_floats(N, C, F));
    layout_acts(m, arena, &m->acts);
}

// ---------------------------------------------------------------------------------------------------------------------
// Operators f and g

// Lets the compute stream wait for an event, if it was ever recorded. The span shows exposed communication.
static void wait_for(GPT *m, cudaEvent_t event, const char *name) {
    Span span(m, m->stream, name);
    CUDA_CHECK(cudaStreamWaitEvent(m->stream, event, 0));
}

// Sums partial (N, C) over the tensor ranks into out (Nl, C): all of it, or under sequence parallelism a rank's rows.
static void tensor_sum(GPT *m, floatX *out, const floatX *partial, size_t N, cudaStream_t s) {
    size_t count = N / m->sp * m->config.C;
    Span span(m, s, m->sp > 1 ? "reduce-scatter" : "all-reduce");
    if (m->sp > 1) NCCL_CHECK(ncclReduceScatter(partial, out, count, NCCL_FLOATX, ncclSum, m->tensor, s));
    else NCCL_CHECK(ncclAllReduce(partial, out, count, NCCL_FLOATX, ncclSum, m->tensor, s));
}

// Under sequence parallelism gathers the rows of all tensor ranks, x (Nl, C) -> out (N, C), and returns out; else x.
static const floatX *tensor_gather(GPT *m, floatX *out, const floatX *x, size_t N, cudaStream_t s) {
    if (m->sp == 1) return x;
    Span span(m, s, "all-gather");
    NCCL_CHECK(ncclAllGather(x, out, N / m->sp * m->config.C, NCCL_FLOATX, m->tensor, s));
    return out;
}

// Operator f of the paper: identity (a gather) in forward, the sum in backward. The sum of dnorm into dreduced, and the
// gather of f's output again, which was not kept, run on a stream of their own and overlap compute.
static const floatX *f_forward(GPT *m, const floatX *x, size_t N) {
    return tensor_gather(m, m->gathered, x, N, m->stream);
}

static const floatX *f_again(GPT *m, const floatX *x) {
    if (m->sp == 1) return x;
    CUDA_CHECK(cudaEventRecord(m->computed, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->comm, m->computed, 0));
    tensor_gather(m, m->gathered, x, m->B * m->T, m->comm);
    CUDA_CHECK(cudaEventRecord(m->gathered_ready, m->comm));
    return m->gathered;
}

// Starts the sum. Weight gradients follow on the compute stream, which waits for f_again here.
static void f_backward_begin(GPT *m) {
    if (m->grid.t == 1) return;
    CUDA_CHECK(cudaEventRecord(m->computed, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->comm, m->computed, 0));
    tensor_sum(m, m->dreduced, m->dnorm, m->B * m->T, m->comm);
    CUDA_CHECK(cudaEventRecord(m->reduced_ready, m->comm));
    if (m->sp > 1) wait_for(m, m->gathered_ready, "wait tensor");
}

static void f_backward_end(GPT *m) {
    if (m->grid.t > 1) wait_for(m, m->reduced_ready, "wait tensor");
}

// Operator g: the sum in forward, identity (a gather) in backward.
static void g_forward(GPT *m, floatX *out, const floatX *partial, size_t N) {
    if (m->grid.t > 1) tensor_sum(m, out, partial, N, m->stream);
}

static const floatX *g_backward(GPT *m, const floatX *dout) {
    return tensor_gather(m, m->dgathered, dout, m->B * m->T, m->stream);
}

// Under sequence parallelism a rank's layernorm gradients cover its own rows: sums those in elements [lo, hi).
static void reduce_layernorms(GPT *m, size_t lo, size_t hi) {
    if (m->sp == 1) return;
    NCCL_CHECK(ncclGroupStart());
    for (size_t i = 0; i < m->table.count; i++) {
        const Tensor *x = &m->table.tensors[i];
        if (!(x->spec->flags & TENSOR_NORM) || x->offset < lo || x->offset >= hi) continue;
        float *dx = m->state.grads + x->offset;
        NCCL_CHECK(ncclAllReduce(dx, dx, x->size, ncclFloat, ncclSum, m->tensor, m->stream));
    }
    NCCL_CHECK(ncclGroupEnd());
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward and backward

// One layer: x (Nl, C) -> out (Nl, C).
static void layer_forward(GPT *m, size_t l, LayerActs *a, floatX *out, const floatX *x, size_t B, size_t T) {
    size_t N = B * T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F;
    floatX **w = m->w[l];
    cudaStream_t s = m->stream;
    layernorm_forward(a->ln1, x, w[LN1W], w[LN1B], Nl, C, s);
    const floatX *ln1 = f_forward(m, a->ln1.out, N);
    matmul_forward(&m->matmul, a->qkv, ln1, w[QKVW], w[QKVB], N, C, 3 * A);
    if (out || m->opt.recompute != RECOMPUTE_BUT_ATTENTION)  // which has kept what attention wrote
        attention_forward(a->atty, a->lse, a->qkv, B, T, A, m->NHl, s, drop(m, DROPOUT_SCORES, l));
    matmul_forward(&m->matmul, m->proj, a->atty, w[PROJW], NULL, N, A, C);
    g_forward(m, m->reduced, m->proj, N);
    layernorm_residual_forward(a->residual2, a->ln2, x, m->reduced, w[PROJB], w[LN2W], w[LN2B], Nl, C, s,
                               drop(m, DROPOUT_PROJ, l));
    const floatX *ln2 = f_forward(m, a->ln2.out, N);
    matmul_forward(&m->matmul, a->fch, ln2, w[FCW], w[FCB], N, C, F);
    gelu_forward(a->fch_gelu, a->fch, N * F, s);
    if (!out) return;  // recomputation: backward reads nothing of what follows
    matmul_forward(&m->matmul, m->proj, a->fch_gelu, w[FCPROJW], NULL, N, F, C);
    g_forward(m, m->reduced, m->proj, N);
    residual_forward(out, a->residual2, m->reduced, w[FCPROJB], Nl, C, s, drop(m, DROPOUT_FCPROJ, l));
}

// One layer: dresidual (Nl, C), the gradient of its output, becomes the gradient of its input x. The first micro-batch
// writes weight gradients and the others add to them (add).
static void layer_backward(GPT *m, size_t l, LayerActs *a, const floatX *x, bool add) {
    size_t B = m->B, T = m->T, N = B * T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F;
    floatX **w = m->w[l], *dresidual = m->dresidual;
    float **dw = m->dw[l], *scratch = m->reduce_scratch;
    cudaStream_t s = m->stream;
    if (m->opt.recompute >= RECOMPUTE_BUT_ATTENTION) layer_forward(m, l, a, NULL, x, B, T);
    if (m->opt.recompute == RECOMPUTE_GELU) gelu_forward(a->fch_gelu, a->fch, N * F, s);
    // the MLP
    const floatX *dout = dropout_backward(m->proj, dresidual, drop(m, DROPOUT_FCPROJ, l), Nl, C, s);
    dout = g_backward(m, dout);
    const floatX *ln2 = f_again(m, a->ln2.out);
    matmul_backward_input(&m->matmul, m->dfch, dout, w[FCPROJW], N, F, C);
    matmul_backward_weight(&m->matmul, dw[FCPROJW], a->fch_gelu, dout, N, F, C, add);
    bias_backward(dw[FCPROJB], dout, scratch, N, C, add, s);
    gelu_backward(m->dfch, dw[FCB], scratch, m->dfch, a->fch, N, F, add, s);
    matmul_backward_input(&m->matmul, m->dnorm, m->dfch, w[FCW], N, C, F);
    f_backward_begin(m);
    matmul_backward_weight(&m->matmul, dw[FCW], ln2, m->dfch, N, C, F, add);
    f_backward_end(m);
    layernorm_backward(dresidual, dw[LN2W], dw[LN2B], scratch, dresidual, m->dreduced, a->residual2, w[LN2W],
                       a->ln2, Nl, C, add, s);
    // the attention
    dout = dropout_backward(m->proj, dresidual, drop(m, DROPOUT_PROJ, l), Nl, C, s);
    dout = g_backward(m, dout);
    const floatX *ln1 = f_again(m, a->ln1.out);
    matmul_backward_input(&m->matmul, m->dnorm, dout, w[PROJW], N, A, C);
    matmul_backward_weight(&m->matmul, dw[PROJW], a->atty, dout, N, A, C, add);
    bias_backward(dw[PROJB], dout, scratch, N, C, add, s);
    attention_backward(m->dqkv, m->dattention, m->dnorm, a->atty, a->lse, a->qkv, B, T, A, m->NHl, s,
                       drop(m, DROPOUT_SCORES, l));
    matmul_backward_input(&m->matmul, m->dnorm, m->dqkv, w[QKVW], N, C, 3 * A);
    f_backward_begin(m);
    matmul_backward_weight(&m->matmul, dw[QKVW], ln1, m->dqkv, N, C, 3 * A, add);
    bias_backward(dw[QKVB], m->dqkv, scratch, N, 3 * A, add, s);
    f_backward_end(m);
    layernorm_backward(dresidual, dw[LN1W], dw[LN1B], scratch, dresidual, m->dreduced, x, w[LN1W], a->ln1,
                       Nl, C, add, s);
}

// Tokens (B, T) -> lnf (Nl, C). A rank looks up the tokens of its part of the vocabulary, rank 0 adds the positions.
static void forward(GPT *m, Acts *acts, const int *inputs, size_t B, size_t T, int micro) {
    size_t N = B * T, Nl = N / m->sp, C = m->config.C, L = m->config.L;
    floatX **w = m->w[0], *x = acts->residual[0];
    Span span(m, m->stream, "forward", micro);
    floatX *partial = m->sp > 1 ? m->proj : x;
    const floatX *wpe = m->grid.t_rank == 0 ? w[WPE] : NULL;
    encoder_forward(partial, inputs, w[WTE], wpe, B, T, C, m->V0, m->Vl, m->stream);
    g_forward(m, x, partial, N);
    dropout_forward(x, drop(m, DROPOUT_EMBEDDING, 0), Nl, C, m->stream);
    for (size_t l = 0; l < L; l++)
        layer_forward(m, l, &acts->layers[l], acts->residual[l + 1], acts->residual[l], B, T);
    layernorm_forward(acts->lnf, acts->residual[L], w[LNFW], w[LNFB], Nl, C, m->stream);
}

// lnf (Nl, C) -> the sum of the micro-batch's losses; to train, the logits become their gradient, and dresidual (Nl, C)
// that of the last layer's output, both of the step's mean loss. Every rank has the logits of its part of the
// vocabulary; only three numbers a token travel: maximum, sum of exponentials, target logit.
static void loss(GPT *m, Acts *acts, const int *targets, int micro, bool training) {
    size_t N = m->B * m->T, Nl = N / m->sp, C = m->config.C, V = m->config.V, L = m->config.L;
    floatX **w = m->w[0];
    float **dw = m->dw[0], *sum = m->row_sums, *target = m->row_sums + N, *losses = m->losses + micro * 2 * N;
    bool add = micro > 0;
    Span span(m, m->stream, "loss", micro);
    const floatX *lnf = f_forward(m, acts->lnf.out, N);
    linear_forward(&m->matmul, m->logits, lnf, w[WTE], NULL, N, C, m->Vl);
    classifier_stats(m->row_max_local, sum, target, m->logits, targets, N, V, m->Vl, m->V0, m->stream);
    NCCL_CHECK(ncclAllReduce(m->row_max_local, m->row_max, N, ncclFloat, ncclMax, m->tensor, m->stream));
    classifier_rescale(sum, m->row_max_local, m->row_max, N, m->stream);
    NCCL_CHECK(ncclAllReduce(m->row_sums, m->row_sums, 2 * N, ncclFloat, ncclSum, m->tensor, m->stream));
    classifier_gradient(losses, m->logits, m->row_max, sum, target, targets, m->dloss, N, V, m->Vl, m->V0, training,
                        m->stream);
    loss_sum(&m->loss_sums[micro], losses, N, m->stream);
    if (!training) return;
    linear_backward_input(&m->matmul, m->dnorm, m->logits, w[WTE], N, C, m->Vl);
    f_backward_begin(m);
    linear_backward_weight(&m->matmul, dw[WTE], lnf, m->logits, N, C, m->Vl, add);
    f_backward_end(m);
    layernorm_backward(m->dresidual, dw[LNFW], dw[LNFB], m->reduce_scratch, NULL, m->dreduced, acts->residual[L],
                       w[LNFW], acts->lnf, Nl, C, add, m->stream);
}

// dresidual (Nl, C), which loss() has left -> gradients of the layers and of the embeddings.
static void backward(GPT *m, Acts *acts, const int *inputs, int micro) {
    size_t B = m->B, T = m->T, Nl = B * T / m->sp, C = m->config.C, L = m->config.L;
    floatX *dx = m->dresidual;
    bool add = micro > 0;
    Span span(m, m->stream, "backward", micro);
    for (size_t l = L; l-- > 0;) layer_backward(m, l, &acts->layers[l], acts->residual[l], add);
    const floatX *dout = dropout_backward(dx, dx, drop(m, DROPOUT_EMBEDDING, 0), Nl, C, m->stream);
    dout = g_backward(m, dout);
    encoder_backward(m->dw[0][WTE], m->dw[0][WPE], dout, inputs, B, T, C, m->config.maxT, m->V0, m->Vl, add, m->stream);
}

// Runs all micro-batches of the global batch: with backward to train, without to validate.
static void run_batch(GPT *m, bool training) {
    for (size_t micro = 0; micro < m->micros; micro++) {
        size_t at = micro * m->B * m->T;
        dropout_at(m, micro);
        forward(m, &m->acts, m->inputs + at, m->B, m->T, micro);
        loss(m, &m->acts, m->targets + at, micro, training);
        if (training) backward(m, &m->acts, m->inputs + at, micro);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

// One step: forward, backward and update over the next global batch.
static void train_step(GPT *m) {
    StepReport report = trainer_begin_step(m);
    run_batch(m, true);
    reduce_layernorms(m, 0, m->table.total);
    trainer_norm(m, &report);
    trainer_adamw(m, &report);
    trainer_end_step(m, &report);
}

// Appends one token to the sample: the logits after the last of its T tokens say which.
static void sample_token(GPT *m) {
    size_t C = m->config.C, last = m->sample.T - 1;
    forward(m, &m->acts, m->inputs, 1, m->sample.padded, NO_MICRO);
    const floatX *lnf = f_forward(m, m->acts.lnf.out, m->sample.padded);
    linear_forward(&m->matmul, m->logits, lnf + last * C, m->w[0][WTE], NULL, 1, C, m->Vl);
    NCCL_CHECK(ncclAllGather(m->logits, m->last_logits, m->Vl, NCCL_FLOATX, m->tensor, m->stream));
    sample_append(m, m->last_logits);
}

// Makes the communicators, with a stream of its own for each that overlaps compute.
static void connect(GPT *m) {
    m->tensor = job_split_grid(&m->job, &m->grid, 't', "tensor", true);
    m->comm = stream_create(m, "all-reduce", true);
    event_create(&m->computed), event_create(&m->reduced_ready), event_create(&m->gathered_ready);
    trainer_warm_up(m);
}

int main(int argc, char **argv) {
    static GPT gpt, *m = &gpt;
    trainer_open(m, argc, argv, OPTIONS_TENSOR);  // bad input ends here
    shard(m);
    trainer_allocate(m, layout);
    connect(m);
    trainer_start(m);

    for (;;) {  // validation, save and sample if they are due, then one more step
        while (validation_goes_on(m)) run_batch(m, false);
        if (save_due(m)) trainer_save(m);
        while (sample_goes_on(m)) sample_token(m);
        if (is_last_step(m)) break;
        train_step(m);
    }
    return trainer_close(m);
}
