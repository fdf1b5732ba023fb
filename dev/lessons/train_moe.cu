// train_moe.cu: train_data.cu plus a mixture of experts (GShard, Lepikhin et al. 2020; Switch, Fedus et al. 2021).
// parent: dev/lessons/train_data.cu
//
// A layer has E MLPs, its experts, and a router that sends each token to k of them (llmc/kernels/moe.cuh). Groups of e
// data ranks share out the experts: one all-to-all takes tokens to them, another brings the results back. So an expert
// sees the tokens of e ranks, and its gradient is summed over the d/e ranks that hold it alike, not over all d.
//
// The d replicas share the global batch. A bucket of gradients (wte, wpe, each layer, ln_f) is summed over them
// by a reduce-scatter. ZeRO-1: each data rank then owns 1/d of every bucket, whatever tensors that cuts, updates it,
// and the weights are gathered again while the next forward runs.
//
// Letters: B micro-batch (sequences), T sequence length, N = B*T tokens, C channels, L layers, NH heads, V vocabulary,
// Vp the same padded to 128. A rank has Nl rows of the residual stream, A channels of heads, F hidden units, Vl of Vp.
// A shape stands behind every pointer. Weights are [in, out]: w[QKVW] is one of a layer, dw[QKVW] its gradient
// (llmc/model.h). One rank has everything: Nl = N, A = C, F = 4C, Vl = Vp.

// Trainer: everything but the mathematics: options, memory, data, optimizer, checkpoints, log, timeline
#include "llmc/trainer/ranks.cuh"  // with trainer.cuh
#include "llmc/kernels/attention.cuh"
#include "llmc/kernels/classifier.cuh"
#include "llmc/kernels/encoder.cuh"
#include "llmc/kernels/gelu.cuh"
#include "llmc/kernels/layernorm.cuh"
#include "llmc/host/moe.h"
#include "llmc/host/moe_log.h"
#include "llmc/kernels/matmul.cuh"
#include "llmc/trainer/split_data.cuh"
#include "llmc/kernels/moe.cuh"

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
    Routing routing;               // where the N tokens go: to R = E B slots rows, in all experts together
    floatX *expert_in;             // (R, C) this rank's E/e experts' rows, of the tokens of e ranks: also R
    floatX *fch, *fch_gelu;        // (R, F) before and after GELU
    floatX *expert_out;            // (R, C) what all experts have made of this rank's tokens
};

// Activations of one micro-batch, kept from its forward to its backward pass.
struct Acts {
    LayerActs *layers;             // [L]
    floatX **residual;             // [L + 1] of (Nl, C): input of layer l; the last is the input of ln_f
    Layernorm lnf;                 // (Nl, C)
};

struct GPT : Trainer {
    MoeSpec experts;               // the model, and what the command line says of experts: e and others
    Moe moe;                       // E experts, k of a token, slots of a sequence in an expert
    bool warm;                     // no kernel is loaded any more but for samples
    ncclComm_t exchanging, alike;  // the e ranks that hold all experts together; the d/e that hold the same ones
    floatX *rows, *arrived;        // (R, C) on their way to or from the experts
    float *dlogits;                // (N, E) of the router
    double *statistics, *host_statistics;  // [L] of moe_statistics, over a step

    ncclComm_t data;               // the d ranks, which all hold the whole model
    cudaStream_t data_stream;
    cudaEvent_t bucket_done, reduced_all;  // gradients of a bucket are complete; all buckets are reduced
    cudaEvent_t *gathered_bucket;  // [buckets] its weights are up to date on every data rank

    Acts acts;                     // of the current micro-batch
    floatX *logits;                // (N, Vl), then their gradient
    float *row_max, *row_sums;     // (N) and (2, N): maximum, sum of exponentials and target logit of each token
    floatX *proj;                  // (N, C) output of a projection; in backward the masked gradient with dropout
    floatX *reduced;               // (Nl, C) the same, ready for its bias and the residual: proj itself on one rank
    floatX *dresidual;             // (Nl, C) gradient of the residual stream
    floatX *dnorm;                 // (N, C) gradient of a layernorm's output, and (N, A) of atty
    floatX *dreduced;              // (Nl, C) the same, ready for the layernorm: dnorm itself on one rank
    floatX *dqkv;                  // (N, 3A)
    floatX *dfch;                  // (R, F)
    float *dattention;             // (B, NH, T) scratch
    float *reduce_scratch;         // for the two-stage column sums
};

// The ranks that hold a bucket alike, this rank's place among them, and its part of the bucket: of experts every e-th.
struct Holders {
    size_t count, rank, part, mine;
    ncclComm_t comm;
};
static Holders holders(const GPT *m, size_t b) {
    size_t e = bucket_of_experts(&m->table, b) ? m->experts.e : 1, count = m->grid.d / e;
    size_t part = (m->table.buckets[b + 1] - m->table.buckets[b]) / count, rank = m->grid.d_rank / e;
    return {count, rank, part, rank * part, e > 1 ? m->alike : m->data};
}

// Makes this data rank the owner of 1/d of every bucket: of the reduced gradients, and with ZeRO of the optimizer.
static void own_buckets(GPT *m, State *state) {
    for (size_t b = 0; b < bucket_count(m); b++) {
        Holders h = holders(m, b);
        state_own(state, m->table.buckets[b] + h.mine, h.part);
    }
}

// Takes the whole model, in buckets that d ranks can share.
static void shard(GPT *m) {
    Shard part = shard_whole(&m->config);
    part.bucket_align = TENSOR_ALIGN * m->grid.d;
    part.e = m->experts.e, part.e_rank = m->grid.d_rank % part.e;
    trainer_shard(m, part);
    own_buckets(m, &m->part);
    if (m->opt.zero) own_buckets(m, &m->state);
}

// Takes memory for the activations of one micro-batch. With recomputation the layers share those of the first one.
static void layout_acts(GPT *m, Arena *arena, Acts *acts) {
    size_t N = m->B * m->T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F, L = m->config.L;
    size_t R = moe_rows(m->moe, m->B);
    host_array(acts->layers, L), host_array(acts->residual, L + 1);
    for (size_t l = 0; l <= L; l++) take(arena, acts->residual[l], Nl * C);
    for (size_t l = 0; l < L; l++) {
        LayerActs *a = &acts->layers[l], *first = &m->acts.layers[0];
        int again = a == first ? RECOMPUTE_NONE : m->opt.recompute;  // what backward computes again
        *a = *first;
        if (again < RECOMPUTE_LAYER) take(arena, a->lse, N * m->NH), take(arena, a->atty, N * A);
        if (again < RECOMPUTE_GELU) take(arena, a->fch_gelu, R * F);
        if (again >= RECOMPUTE_REST) continue;
        take_layernorm(arena, &a->ln1, Nl, C), take_layernorm(arena, &a->ln2, Nl, C);
        take(arena, a->qkv, N * 3 * A), take(arena, a->residual2, Nl * C);
        take_routing(arena, &a->routing, m->moe, m->B, m->T);
        take(arena, a->expert_in, R * C), take(arena, a->expert_out, R * C), take(arena, a->fch, R * F);
    }
    take_layernorm(arena, &acts->lnf, Nl, C);
}

// Takes memory for every buffer: called once to count bytes, and once to set pointers.
static void layout(GPT *m) {
    size_t N = m->B * m->T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F;
    size_t E = m->moe.E, R = moe_rows(m->moe, m->B), held = E / m->experts.e;
    Arena *arena = trainer_layout(m);
    take(arena, m->rows, R * C), take(arena, m->arrived, R * C), take(arena, m->dlogits, N * E);
    take(arena, m->statistics, m->config.L * moe_statistics_count(m->moe));
    take(arena, m->logits, N * m->Vl);
    take(arena, m->row_max, N), take(arena, m->row_sums, 2 * N);
    take(arena, m->proj, N * C), take(arena, m->dresidual, Nl * C), take(arena, m->dnorm, N * C);
    m->reduced = m->proj, m->dreduced = m->dnorm;
    take(arena, m->dqkv, N * 3 * A), take(arena, m->dfch, R * F), take(arena, m->dattention, N * m->NH);
    take(arena, m->reduce_scratch, reduce_scratch_floats(N, C, E * C) + reduce_scratch_floats(R / held, C, F));
    layout_acts(m, arena, &m->acts);
}

// ---------------------------------------------------------------------------------------------------------------------
// Buckets: gradients are summed and weights are gathered over the data ranks

// Lets the compute stream wait for an event, if it was ever recorded. The span shows exposed communication.
static void wait_for(GPT *m, cudaEvent_t event, const char *name) {
    Span span(m, m->stream, name);
    CUDA_CHECK(cudaStreamWaitEvent(m->stream, event, 0));
}

// Sums a bucket of gradients over the data ranks, on a stream of its own beside the backward pass; each rank ends with
// its part, and without ZeRO all of them with all parts.
static void reduce_bucket(GPT *m, size_t bucket) {
    Holders h = holders(m, bucket);
    float *grads = m->state.grads + m->table.buckets[bucket], *mine = grads + h.mine;
    if (h.count == 1 || h.part == 0) return;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->data_stream, m->bucket_done, 0));
    Span span(m, m->data_stream, "reduce-scatter");
    NCCL_CHECK(ncclReduceScatter(grads, mine, h.part, ncclFloat, ncclSum, h.comm, m->data_stream));
    if (!m->opt.zero) NCCL_CHECK(ncclAllGather(mine, grads, h.part, ncclFloat, h.comm, m->data_stream));
}

// Gathers the updated weights of all buckets, in the order in which forward needs them.
static void gather_weights(GPT *m) {
    if (m->grid.d == 1 || !m->opt.zero) return;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->data_stream, m->bucket_done, 0));
    for (size_t b = 0; b < bucket_count(m); b++) {
        Holders h = holders(m, b);
        size_t part = h.part;
        if (part == 0) continue;
        floatX *params = m->state.params + m->table.buckets[b], *mine = params + h.mine;
        Span span(m, m->data_stream, "all-gather");
        NCCL_CHECK(ncclAllGather(mine, params, part, NCCL_FLOATX, h.comm, m->data_stream));
        CUDA_CHECK(cudaEventRecord(m->gathered_bucket[b], m->data_stream));
        if (!m->opt.overlap) CUDA_CHECK(cudaStreamWaitEvent(m->stream, m->gathered_bucket[b], 0));
    }
}

// Whether a bucket of gradients is complete once this micro-batch's backward is through, and its sum may overlap.
static bool reduce_now(const GPT *m, int micro) { return m->opt.overlap && (size_t)micro + 1 == m->micros; }

// Waits on the device until a bucket's weights have been gathered: called before they are read.
static void use_bucket(GPT *m, size_t bucket) {
    if (m->grid.d > 1 && m->opt.zero) wait_for(m, m->gathered_bucket[bucket], "wait data");
}

// ---------------------------------------------------------------------------------------------------------------------
// Experts

// The all-to-all of e ranks: takes the rows (E, B slots, C) of this rank's tokens to their experts, where they arrive
// as (E/e, e, B slots, C), so that an expert's rows are one matrix; or takes them back. Empty places travel too: so no
// rank need know how many tokens another one sends, and the host only enqueues. Nothing overlaps with it.
static void exchange(GPT *m, floatX *out, const floatX *in, size_t B, bool back) {
    size_t e = m->experts.e, held = m->moe.E / e, count = B * m->moe.slots * m->config.C;
    Span span(m, m->stream, back ? "combine" : "dispatch");
    NCCL_CHECK(ncclGroupStart());
    for (size_t rank = 0; rank < e; rank++) {
        for (size_t x = 0; x < held; x++) {
            size_t of_tokens = (rank * held + x) * count, of_experts = (x * e + rank) * count;
            const floatX *from = in + (back ? of_experts : of_tokens);
            NCCL_CHECK(ncclSend(from, count, NCCL_FLOATX, (int)rank, m->exchanging, m->stream));
            floatX *to = out + (back ? of_tokens : of_experts);
            NCCL_CHECK(ncclRecv(to, count, NCCL_FLOATX, (int)rank, m->exchanging, m->stream));
        }
    }
    NCCL_CHECK(ncclGroupEnd());
    if (!m->warm || m->sample.running) trainer_synchronize(m);  // new shapes follow, which load kernels
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward and backward

// One layer: x (Nl, C) -> out (Nl, C).
static void layer_forward(GPT *m, size_t l, LayerActs *a, floatX *out, const floatX *x, size_t B, size_t T) {
    size_t N = B * T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F;
    floatX **w = m->w[l];
    cudaStream_t s = m->stream;
    layernorm_forward(a->ln1, x, w[LN1W], w[LN1B], Nl, C, s);
    matmul_forward(&m->matmul, a->qkv, a->ln1.out, w[QKVW], w[QKVB], N, C, 3 * A);
    if (out || m->opt.recompute != RECOMPUTE_REST)  // which has kept what attention wrote
        attention_forward(a->atty, a->lse, a->qkv, B, T, A, m->NH, s, drop(m, DROPOUT_SCORES, l));
    matmul_forward(&m->matmul, m->proj, a->atty, w[PROJW], NULL, N, A, C);
    layernorm_residual_forward(a->residual2, a->ln2, x, m->reduced, w[PROJB], w[LN2W], w[LN2B], Nl, C, s,
                               drop(m, DROPOUT_PROJ, l));
    moe_route(a->routing, a->ln2.out, w[ROUTERW], m->moe, B, T, C, s);
    moe_gather(m->rows, a->ln2.out, a->routing, m->moe, B, C, false, s);
    exchange(m, a->expert_in, m->rows, B, false);
    size_t held = m->moe.E / m->experts.e, R = moe_rows(m->moe, B), Re = R / held;
    for (size_t i = 0; i < held; i++)
        matmul_forward(&m->matmul, a->fch + i * Re * F, a->expert_in + i * Re * C, w[FCW] + i * C * F, w[FCB] + i * F,
                       Re, C, F);
    gelu_forward(a->fch_gelu, a->fch, R * F, s);
    for (size_t i = 0; i < held; i++)
        matmul_forward(&m->matmul, m->rows + i * Re * C, a->fch_gelu + i * Re * F, w[FCPROJW] + i * F * C,
                       w[FCPROJB] + i * C, Re, F, C);
    exchange(m, a->expert_out, m->rows, B, true);
    if (!out) return;  // recomputation: backward reads nothing of what follows
    moe_statistics(m->statistics + l * moe_statistics_count(m->moe), a->routing, m->moe, B, T, s);
    moe_combine(out, a->residual2, a->expert_out, a->routing, m->moe, Nl, C, s, drop(m, DROPOUT_FCPROJ, l));
}

// One layer: dresidual (Nl, C), the gradient of its output, becomes the gradient of its input x. The first micro-batch
// writes weight gradients and the others add to them (add).
static void layer_backward(GPT *m, size_t l, LayerActs *a, const floatX *x, bool add) {
    size_t B = m->B, T = m->T, N = B * T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F;
    floatX **w = m->w[l], *dresidual = m->dresidual;
    float **dw = m->dw[l], *scratch = m->reduce_scratch;
    cudaStream_t s = m->stream;
    if (m->opt.recompute >= RECOMPUTE_REST) layer_forward(m, l, a, NULL, x, B, T);
    size_t held = m->moe.E / m->experts.e, R = moe_rows(m->moe, B), Re = R / held;
    if (m->opt.recompute == RECOMPUTE_GELU) gelu_forward(a->fch_gelu, a->fch, R * F, s);
    // the MLP
    const floatX *dout = dropout_backward(m->proj, dresidual, drop(m, DROPOUT_FCPROJ, l), Nl, C, s);
    moe_backward_router(m->dlogits, dout, a->expert_out, a->routing, m->moe, m->dloss, B, T, C, s);
    moe_gather(m->rows, dout, a->routing, m->moe, B, C, true, s);
    exchange(m, m->arrived, m->rows, B, false);
    for (size_t i = 0; i < held; i++) {
        size_t in = i * Re * C, hidden = i * Re * F, weight = i * C * F;
        const floatX *dy = m->arrived + in;
        floatX *dfch = m->dfch + hidden;
        matmul_backward_input(&m->matmul, dfch, dy, w[FCPROJW] + weight, Re, F, C);
        matmul_backward_weight(&m->matmul, dw[FCPROJW] + weight, a->fch_gelu + hidden, dy, Re, F, C, add);
        bias_backward(dw[FCPROJB] + i * C, dy, scratch, Re, C, add, s);
        gelu_backward(dfch, dw[FCB] + i * F, scratch, dfch, a->fch + hidden, Re, F, add, s);
        matmul_backward_input(&m->matmul, m->rows + in, dfch, w[FCW] + weight, Re, C, F);
        matmul_backward_weight(&m->matmul, dw[FCW] + weight, a->expert_in + in, dfch, Re, C, F, add);
    }
    exchange(m, m->arrived, m->rows, B, true);
    moe_backward_weight(dw[ROUTERW], scratch, m->dlogits, a->ln2.out, N, C, m->moe.E, add, s);
    moe_backward_input(m->dnorm, m->arrived, m->dlogits, w[ROUTERW], a->routing, m->moe, N, C, s);
    layernorm_backward(dresidual, dw[LN2W], dw[LN2B], scratch, dresidual, m->dreduced, a->residual2, w[LN2W],
                       a->ln2, Nl, C, add, s);
    // the attention
    dout = dropout_backward(m->proj, dresidual, drop(m, DROPOUT_PROJ, l), Nl, C, s);
    matmul_backward_input(&m->matmul, m->dnorm, dout, w[PROJW], N, A, C);
    matmul_backward_weight(&m->matmul, dw[PROJW], a->atty, dout, N, A, C, add);
    bias_backward(dw[PROJB], dout, scratch, N, C, add, s);
    attention_backward(m->dqkv, m->dattention, m->dnorm, a->atty, a->lse, a->qkv, B, T, A, m->NH, s,
                       drop(m, DROPOUT_SCORES, l));
    matmul_backward_input(&m->matmul, m->dnorm, m->dqkv, w[QKVW], N, C, 3 * A);
    matmul_backward_weight(&m->matmul, dw[QKVW], a->ln1.out, m->dqkv, N, C, 3 * A, add);
    bias_backward(dw[QKVB], m->dqkv, scratch, N, 3 * A, add, s);
    layernorm_backward(dresidual, dw[LN1W], dw[LN1B], scratch, dresidual, m->dreduced, x, w[LN1W], a->ln1,
                       Nl, C, add, s);
}

// Tokens (B, T) -> lnf (Nl, C).
static void forward(GPT *m, Acts *acts, const int *inputs, size_t B, size_t T, int micro) {
    size_t N = B * T, Nl = N / m->sp, C = m->config.C, L = m->config.L;
    floatX **w = m->w[0], *x = acts->residual[0];
    Span span(m, m->stream, "forward", micro);
    use_bucket(m, 0);
    use_bucket(m, 1);
    encoder_forward(x, inputs, w[WTE], w[WPE], B, T, C, m->V0, m->Vl, m->stream);
    dropout_forward(x, drop(m, DROPOUT_EMBEDDING, 0), Nl, C, m->stream);
    for (size_t l = 0; l < L; l++) {
        use_bucket(m, 2 + 2 * l), use_bucket(m, 3 + 2 * l);
        layer_forward(m, l, &acts->layers[l], acts->residual[l + 1], acts->residual[l], B, T);
    }
    use_bucket(m, bucket_count(m) - 1);
    layernorm_forward(acts->lnf, acts->residual[L], w[LNFW], w[LNFB], Nl, C, m->stream);
}

// lnf (Nl, C) -> the sum of the micro-batch's losses; to train, the logits become their gradient, and dresidual (Nl, C)
// that of the last layer's output, both of the step's mean loss.
static void loss(GPT *m, Acts *acts, const int *targets, int micro, bool training) {
    size_t N = m->B * m->T, Nl = N / m->sp, C = m->config.C, V = m->config.V, L = m->config.L;
    floatX **w = m->w[0];
    float **dw = m->dw[0], *sum = m->row_sums, *target = m->row_sums + N, *losses = m->losses + micro * 2 * N;
    bool add = micro > 0;
    Span span(m, m->stream, "loss", micro);
    linear_forward(&m->matmul, m->logits, acts->lnf.out, w[WTE], NULL, N, C, m->Vl);
    classifier_stats(m->row_max, sum, target, m->logits, targets, N, V, m->Vl, m->V0, m->stream);
    classifier_gradient(losses, m->logits, m->row_max, sum, target, targets, m->dloss, N, V, m->Vl, m->V0, training,
                        m->stream);
    loss_sum(&m->loss_sums[micro], losses, N, m->stream);
    if (!training) return;
    linear_backward_input(&m->matmul, m->dnorm, m->logits, w[WTE], N, C, m->Vl);
    linear_backward_weight(&m->matmul, dw[WTE], acts->lnf.out, m->logits, N, C, m->Vl, add);
    layernorm_backward(m->dresidual, dw[LNFW], dw[LNFB], m->reduce_scratch, NULL, m->dreduced, acts->residual[L],
                       w[LNFW], acts->lnf, Nl, C, add, m->stream);
    if (reduce_now(m, micro)) reduce_bucket(m, bucket_count(m) - 1);
}

// dresidual (Nl, C), which loss() has left -> gradients of the layers and of the embeddings.
static void backward(GPT *m, Acts *acts, const int *inputs, int micro) {
    size_t B = m->B, T = m->T, Nl = B * T / m->sp, C = m->config.C, L = m->config.L;
    floatX *dx = m->dresidual;
    bool add = micro > 0;
    Span span(m, m->stream, "backward", micro);
    for (size_t l = L; l-- > 0;) {
        layer_backward(m, l, &acts->layers[l], acts->residual[l], add);
        if (reduce_now(m, micro)) reduce_bucket(m, 3 + 2 * l), reduce_bucket(m, 2 + 2 * l);
    }
    const floatX *dout = dropout_backward(dx, dx, drop(m, DROPOUT_EMBEDDING, 0), Nl, C, m->stream);
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
    size_t count = m->config.L * moe_statistics_count(m->moe);
    CUDA_CHECK(cudaMemsetAsync(m->statistics, 0, count * sizeof(double), m->stream));
    run_batch(m, true);
    // With overlap those of wte and wpe are left, which the encoder's gradient completes.
    for (size_t b = 0; b < (m->opt.overlap ? 2 : bucket_count(m)); b++) reduce_bucket(m, b);
    CUDA_CHECK(cudaEventRecord(m->reduced_all, m->data_stream));
    if (m->grid.d > 1) wait_for(m, m->reduced_all, "wait data");
    trainer_norm(m, &report);
    trainer_adamw(m, &report);
    gather_weights(m);
    if (m->opt.log) {  // of all ranks
        size_t bytes = count * sizeof(double);
        NCCL_CHECK(ncclAllReduce(m->statistics, m->statistics, count, ncclDouble, ncclSum, m->job.world, m->stream));
        CUDA_CHECK(cudaMemcpyAsync(m->host_statistics, m->statistics, bytes, cudaMemcpyDeviceToHost, m->stream));
    }
    trainer_end_step(m, &report);
    double tokens = (double)m->batch * (double)m->T;
    if (m->log.json && !m->opt.simulate)
        moe_log(&m->log, report.step, m->host_statistics, m->config.L, m->moe.E, tokens);
}

// Appends one token to the sample: the logits after the last of its T tokens say which.
static void sample_token(GPT *m) {
    size_t C = m->config.C, last = m->sample.T - 1;
    forward(m, &m->acts, m->inputs, 1, m->sample.padded, NO_MICRO);
    linear_forward(&m->matmul, m->logits, m->acts.lnf.out + last * C, m->w[0][WTE], NULL, 1, C, m->Vl);
    sample_append(m, m->logits);
}

// Makes the communicator, with a stream of its own, as it overlaps compute.
// And the experts' buckets. Then two micro-batches connect all pairs of ranks that exchange rows, and load all kernels
// while no message is pending: the second has dropout, and adds to gradients.
static void connect(GPT *m) {
    size_t e = m->experts.e, e_rank = m->grid.d_rank % e;
    m->exchanging = job_split_data(&m->job, &m->grid, m->grid.d_rank - e_rank, e, 1, "experts", true);
    m->alike = job_split_data(&m->job, &m->grid, e_rank, m->grid.d / e, e, "expert data", false);
    m->data = job_split_grid(&m->job, &m->grid, 'd', "data");
    event_create(&m->bucket_done), event_create(&m->reduced_all);
    host_array(m->gathered_bucket, bucket_count(m));
    for (size_t b = 0; b < bucket_count(m); b++) event_create(&m->gathered_bucket[b]);
    m->data_stream = stream_create(m, "data", true);
    trainer_warm_up(m);
    for (int micro = 0; micro < 2; micro++) {
        trainer_set_dropout(m, micro == 1);
        forward(m, &m->acts, m->inputs, m->B, m->T, micro);
        loss(m, &m->acts, m->targets, micro, true);
        backward(m, &m->acts, m->inputs, micro);
    }
    size_t count = m->config.L * moe_statistics_count(m->moe);
    CUDA_CHECK(cudaMallocHost((void **)&m->host_statistics, count * sizeof(double)));
    m->warm = true;
}

// Checks this lesson's flags, once all others have been checked.
static bool check_experts(Trainer *trainer, Error *err) {
    GPT *m = static_cast<GPT *>(trainer);
    const MoeSpec *o = &m->experts;
    m->moe = {o->E, o->k, moe_capacity(o->capacity, m->opt.seq, o->k, o->E), (float)o->balance, (float)o->z};
    return moe_check(o, m->grid.d, m->opt.zero, err);
}

int main(int argc, char **argv) {
    static GPT gpt, *m = &gpt;
    m->experts = moe_spec(8, 1), m->experts.model.read = moe_config_read, m->experts.model.write = moe_config_write;
    Lesson lesson = {{MOE_OPTIONS, MOE_OPTION_ROWS, &m->experts}, check_experts, &m->experts.model, NULL};
    trainer_open(m, argc, argv, OPTIONS_DATA, lesson);  // bad input ends here
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
