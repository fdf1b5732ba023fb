// train_moe.cu: train_data.cu plus a mixture of experts.
// parent: dev/lessons/train_data.cu
//
// A layer has E MLPs, its experts, and a router that sends each token to k of them.
// (Papers: GShard, Lepikhin et al. 2020; Switch, Fedus et al. 2021. Kernels:
// llmc/kernels/moe.cuh.) Groups of e data ranks share out the experts. One all-to-all takes
// tokens to them, another one brings the results back. So an expert sees the tokens of e
// ranks.
//
// The d ranks share the global batch. The gradients of a layer are two buckets. One is
// the experts', summed over the d/e ranks that hold the same experts. The other is the
// rest, summed over all d ranks. ZeRO-1: each of the ranks that hold a bucket then owns a
// part of it, and updates that. The weights are gathered again while the next forward
// runs.
//
// More letters, for a micro-batch and a layer:
//   El = E/e experts on this rank.
//   R = E B slots places that this rank's tokens have in all E experts.
//   They have as many places for the tokens of all e ranks, Re = R/El each.
//
// Letters: B micro-batch (sequences), T sequence length, N = B*T tokens, C channels,
// L layers, NH heads, V vocabulary, Vp the same padded to 128. A shape stands behind every
// pointer. Weights are [in, out]: w[QKVW] is one of a layer, dw[QKVW] its gradient
// (llmc/model.h).
//
// The trainer train_gpt_tp.cu shares each layer among ranks, and has letters for a rank's
// part of it. Here a rank has whole layers:
//   A = C channels, in NHl = NH heads.
//   F = 4C hidden units.
//   Vl = Vp tokens of the vocabulary, from V0 = 0 on.
//   Nl = N/sp = N rows of the residual stream, as sp = 1.

// Trainer: everything but the mathematics: options, memory, data, optimizer, checkpoints
#include "llmc/trainer/split_data.cuh"
#include "llmc/host/moe.h"
#include "llmc/kernels/attention.cuh"
#include "llmc/kernels/classifier.cuh"
#include "llmc/kernels/encoder.cuh"
#include "llmc/kernels/gelu.cuh"
#include "llmc/kernels/layernorm.cuh"
#include "llmc/kernels/matmul.cuh"
#include "llmc/kernels/moe.cuh"
#include "llmc/trainer/moe_statistics.cuh"

// ----------------------------------------------------------------------------------------
// The model and its memory

// The forward pass of a layer keeps these for its backward pass.
struct LayerActs {
    Layernorm ln1;      // (Nl, C)      with mean and rstd of each row
    floatX *qkv;        // (N, 3A)      queries, keys and values side by side
    float *lse;         // (B, NHl, T)  log-sum-exp of each query's scores
    floatX *atty;       // (N, A)       output of attention
    floatX *residual2;  // (Nl, C)      residual stream between attention and MLP
    Layernorm ln2;      // (Nl, C)
    Routing routing;    // where the N tokens go, and from where the rows of experts come
    floatX *expert_in;  // (R, C)       the tokens of e ranks that came to this rank's experts
    floatX *fch;        // (R, F)       hidden units before GELU
    floatX *fch_gelu;   // (R, F)       and behind it
    floatX *expert_out; // (R, C)       results of all experts for this rank's tokens
};

// A micro-batch keeps these from its forward to its backward pass.
struct Acts {
    LayerActs *layers;  // [L]
    floatX **residual;  // [L + 1] of (Nl, C): the input of each layer, and that of ln_f
    Layernorm lnf;      // (Nl, C)
};

struct GPT : Trainer {
    MoeSpec experts;               // the model, and the options of experts
    Moe moe;                       // E experts, k of a token, slots of a sequence in an expert
    ncclComm_t exchanging;         // the e ranks that hold all experts; NULL: not connected yet
    ncclComm_t alike;              // the d/e ranks that hold the same experts
    MoeStatistics statistics;      // for --log

    ncclComm_t data;               // the d ranks, which all hold everything but experts
    cudaStream_t data_stream;
    cudaEvent_t bucket_done;       // the next bucket to reduce or gather is written
    cudaEvent_t reduced_all;       // all buckets are reduced
    cudaEvent_t *gathered_bucket;  // [buckets] its weights are up to date on every data rank

    Acts acts;          // of the current micro-batch

    // The loss has the largest buffer, so its gradient takes the place of the logits.
    floatX *logits;     // (N, Vl)      become their own gradient
    float *row_max;     // (N)          the largest logit of a token
    float *row_sums;    // (2, N)       sum of the exponentials; logit of the target

    // One layer is at work at a time, so one set of these serves all.
    floatX *proj;       // (N, C)       output of a projection; gradient behind dropout
    floatX *dresidual;  // (Nl, C)      gradient of the residual stream
    floatX *dnorm;      // (N, C)       gradient of a layernorm's output; (N, A) of atty
    floatX *dqkv;       // (N, 3A)
    floatX *dfch;       // (R, F)
    floatX *rows;       // (R, C)       on their way to or from the experts
    floatX *arrived;    // (R, C)       and where they come to
    float *dlogits;     // (N, E)       gradient of the router's logits
    float *dattention;  // (B, NHl, T)  scratch of attention's backward pass
    float *scratch;     // partial sums over rows, for gradients of biases and layernorms
};

// The ranks that hold the same bucket, and this rank's part of it.
struct Holders {
    ncclComm_t comm;
    size_t count;  // ranks
    size_t part;   // elements of the bucket that each rank owns
    size_t mine;   // and where this rank's part begins
};

// Returns the holders of bucket b: all d ranks, or for experts every e-th of them. That
// is one rank of each group that shares the experts out.
static Holders holders(const GPT *m, size_t b) {
    bool experts = bucket_of_experts(&m->table, b) && m->experts.e > 1;
    size_t e = experts ? m->experts.e : 1, count = m->grid.d / e;
    size_t part = (m->table.buckets[b + 1] - m->table.buckets[b]) / count;
    size_t rank = m->grid.d_rank / e;
    return {experts ? m->alike : m->data, count, part, rank * part};
}

// Makes this data rank the owner of its part of every bucket.
static void own_buckets(GPT *m, State *state) {
    for (size_t b = 0; b < bucket_count(m); b++) {
        Holders h = holders(m, b);
        state_own(state, m->table.buckets[b] + h.mine, h.part);
    }
}

// Takes 1/e of the experts and all else, in buckets that d ranks can share. This rank owns
// its part of the reduced gradients of each, and with ZeRO the same part of the optimizer.
static void shard(GPT *m) {
    Shard mine = shard_whole(&m->config);
    mine.bucket_align = TENSOR_ALIGN * m->grid.d;
    mine.e = m->experts.e;
    mine.e_rank = m->grid.d_rank % mine.e;
    trainer_shard(m, mine);

    own_buckets(m, &m->share);
    if (m->opt.zero)
        own_buckets(m, &m->state);
}

// Takes memory for the activations of one micro-batch. Recomputed activations live only
// while one layer is at work, so all layers can share the buffers of the first.
static void layout_acts(GPT *m, Arena *arena, Acts *acts) {
    size_t N = m->B * m->T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F;
    size_t L = m->config.L, R = moe_rows(m->moe, m->B);
    host_array(acts->layers, L);
    host_array(acts->residual, L + 1);

    // The input of each layer is always kept: the layer can be computed again from it.
    for (size_t l = 0; l <= L; l++)
        take(arena, acts->residual[l], Nl * C);

    for (size_t l = 0; l < L; l++) {
        LayerActs *a = &acts->layers[l];
        LayerActs *first = &m->acts.layers[0];
        if (m->opt.recompute == RECOMPUTE_LAYER && a != first) {
            *a = *first;  // all but its input, which residual has
            continue;
        }

        take_layernorm(arena, &a->ln1, Nl, C);
        take(arena, a->qkv, N * 3 * A);
        take(arena, a->lse, N * m->NHl);
        take(arena, a->atty, N * A);
        take(arena, a->residual2, Nl * C);
        take_layernorm(arena, &a->ln2, Nl, C);
        take_routing(arena, &a->routing, m->moe, m->B, m->T);
        take(arena, a->expert_in, R * C);
        take(arena, a->expert_out, R * C);
        take(arena, a->fch, R * F);
        if (m->opt.recompute == RECOMPUTE_GELU && a != first)
            a->fch_gelu = first->fch_gelu;
        else
            take(arena, a->fch_gelu, R * F);
    }
    take_layernorm(arena, &acts->lnf, Nl, C);
}

// Takes memory for every buffer: called once to count bytes, and once to set pointers, so
// that --dry-run prints the bytes that training takes.
static void layout(GPT *m) {
    size_t N = m->B * m->T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F;
    size_t E = m->moe.E, R = moe_rows(m->moe, m->B), Re = R / (E / m->experts.e);
    Arena *arena = trainer_layout(m);

    // the loss
    take(arena, m->logits, N * m->Vl);
    take(arena, m->row_max, N);
    take(arena, m->row_sums, 2 * N);

    // one layer at a time
    take(arena, m->proj, N * C);
    take(arena, m->dresidual, Nl * C);
    take(arena, m->dnorm, N * C);
    take(arena, m->dqkv, N * 3 * A);
    take(arena, m->dfch, R * F);
    take(arena, m->dattention, N * m->NHl);
    size_t sums = reduce_scratch_floats(N, C, E * C);
    take(arena, m->scratch, sums + reduce_scratch_floats(Re, C, F));

    // experts
    take(arena, m->rows, R * C);
    take(arena, m->arrived, R * C);
    take(arena, m->dlogits, N * E);
    take_statistics(arena, &m->statistics, m->config.L, m->moe);

    // all layers
    layout_acts(m, arena, &m->acts);
}

// ----------------------------------------------------------------------------------------
// Buckets: gradients are summed and weights are gathered over the data ranks

// Sums a bucket of gradients over the ranks that hold it, on a stream of its own, so that
// it overlaps backward. Each rank gets its part of the sum, and without ZeRO all parts.
static void reduce_bucket(GPT *m, size_t bucket) {
    Holders h = holders(m, bucket);
    float *grads = m->state.grads + m->table.buckets[bucket];
    float *mine = grads + h.mine;
    if (h.count == 1 || h.part == 0) return;

    cudaStream_t s = m->data_stream;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(s, m->bucket_done, 0));
    Span span(m, s, "reduce-scatter");
    NCCL_CHECK(ncclReduceScatter(grads, mine, h.part, ncclFloat, ncclSum, h.comm, s));
    if (!m->opt.zero)
        NCCL_CHECK(ncclAllGather(mine, grads, h.part, ncclFloat, h.comm, s));
}

// Gathers the updated weights of all buckets, in the order in which forward needs them.
static void gather_weights(GPT *m) {
    if (m->grid.d == 1 || !m->opt.zero) return;
    cudaStream_t s = m->data_stream;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(s, m->bucket_done, 0));
    for (size_t b = 0; b < bucket_count(m); b++) {
        Holders h = holders(m, b);
        if (h.part == 0) continue;
        floatX *params = m->state.params + m->table.buckets[b];
        floatX *mine = params + h.mine;
        Span span(m, s, "all-gather");
        NCCL_CHECK(ncclAllGather(mine, params, h.part, NCCL_FLOATX, h.comm, s));
        CUDA_CHECK(cudaEventRecord(m->gathered_bucket[b], s));
        if (!m->opt.overlap)
            CUDA_CHECK(cudaStreamWaitEvent(m->stream, m->gathered_bucket[b], 0));
    }
}

// Returns true if this micro-batch's backward completes buckets of gradients, and their sums
// may overlap the rest of backward.
static bool reduce_now(const GPT *m, int micro) {
    return m->opt.overlap && (size_t)micro + 1 == m->micros;
}

// Waits on the device until a bucket's weights have been gathered: called before they are
// read.
static void use_bucket(GPT *m, size_t bucket) {
    if (m->grid.d > 1 && m->opt.zero)
        wait_for(m, m->gathered_bucket[bucket], "wait data");
}

// ----------------------------------------------------------------------------------------
// Experts

// Exchanges rows with the e ranks in one all-to-all. It takes the rows (E, B slots, C) of
// this rank's tokens to their experts, or back. They arrive as (El, e, B slots, C), so an
// expert's rows are one matrix. Empty places travel, too. So no rank need know how many
// tokens another one sends, and the host only enqueues. Nothing overlaps with it.
static void exchange(GPT *m, floatX *out, const floatX *in, size_t B, bool back) {
    if (!m->exchanging) return;
    size_t e = m->experts.e, El = m->moe.E / e, count = B * m->moe.slots * m->config.C;
    ncclComm_t comm = m->exchanging;
    cudaStream_t s = m->stream;
    Span span(m, s, back ? "combine" : "dispatch");

    NCCL_CHECK(ncclGroupStart());
    for (size_t rank = 0; rank < e; rank++) {
        for (size_t x = 0; x < El; x++) {
            size_t by_token = (rank * El + x) * count;
            size_t by_expert = (x * e + rank) * count;
            const floatX *from = in + (back ? by_expert : by_token);
            floatX *to = out + (back ? by_token : by_expert);
            NCCL_CHECK(ncclSend(from, count, NCCL_FLOATX, (int)rank, comm, s));
            NCCL_CHECK(ncclRecv(to, count, NCCL_FLOATX, (int)rank, comm, s));
        }
    }
    trainer_group_end(m);
}

// ----------------------------------------------------------------------------------------
// Forward and backward

// Runs one layer, x (Nl, C) -> out (Nl, C). Attention lets each token look at the tokens
// before it. Experts look at each token alone. Both add to the residual stream.
static void layer_forward(GPT *m, size_t l, LayerActs *a, floatX *out, const floatX *x,
                          size_t B, size_t T) {
    size_t N = B * T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F;
    size_t El = m->moe.E / m->experts.e, R = moe_rows(m->moe, B), Re = R / El;
    floatX **w = m->w[l];
    Matmul *mm = &m->matmul;
    cudaStream_t s = m->stream;

    // attention: a token's query meets the keys of all tokens before it, and takes more of
    // the values whose keys are like it
    layernorm_forward(a->ln1, x, w[LN1W], w[LN1B], Nl, C, s);
    matmul_forward(mm, a->qkv, a->ln1.out, w[QKVW], w[QKVB], N, C, 3 * A);
    attention_forward(a->atty, a->lse, a->qkv, B, T, A, m->NHl, s,
                      drop(m, DROPOUT_SCORES, l));
    matmul_forward(mm, m->proj, a->atty, w[PROJW], NULL, N, A, C);

    // Its bias, the sum and the next layernorm are one kernel: the row is read once.
    layernorm_residual_forward(a->residual2, a->ln2, x, m->proj, w[PROJB],
                               w[LN2W], w[LN2B], Nl, C, s, drop(m, DROPOUT_PROJ, l));

    // A token goes to the k experts to which the router gives the largest probabilities.
    moe_route(a->routing, a->ln2.out, w[ROUTERW], m->moe, B, T, C, s);
    moe_gather(m->rows, a->ln2.out, a->routing, m->moe, B, C, false, s);
    exchange(m, a->expert_in, m->rows, B, false);

    // an MLP of each expert
    for (size_t i = 0; i < El; i++) {
        const floatX *in = a->expert_in + i * Re * C;
        floatX *fch = a->fch + i * Re * F;
        matmul_forward(mm, fch, in, w[FCW] + i * C * F, w[FCB] + i * F, Re, C, F);
    }
    gelu_forward(a->fch_gelu, a->fch, R * F, s);
    for (size_t i = 0; i < El; i++) {
        const floatX *fch_gelu = a->fch_gelu + i * Re * F;
        floatX *result = m->rows + i * Re * C;
        matmul_forward(mm, result, fch_gelu, w[FCPROJW] + i * F * C, w[FCPROJB] + i * C,
                       Re, F, C);
    }

    // The results go back, each to be weighted by the router's probability. So the router has
    // a gradient, too, though its choice has none.
    exchange(m, a->expert_out, m->rows, B, true);
    if (!out) return;  // Backward computes a layer again up to here: it reads no more.

    statistics_add(m, &m->statistics, l, a->routing, m->moe, B, T);
    moe_combine(out, a->residual2, a->expert_out, a->routing, m->moe, Nl, C, s,
                drop(m, DROPOUT_FCPROJ, l));
}

// Runs one layer backward. dresidual (Nl, C), the gradient of its output, becomes the
// gradient of its input x. The gradient of a matrix product is two products, one for its
// input and one for its weight. Gradients of weights are sums over the micro-batches: the
// first one writes them, the others add to them (add).
static void layer_backward(GPT *m, size_t l, LayerActs *a, const floatX *x, bool add) {
    size_t B = m->B, T = m->T;
    size_t N = B * T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F;
    size_t El = m->moe.E / m->experts.e, R = moe_rows(m->moe, B), Re = R / El;
    floatX **w = m->w[l];
    float **dw = m->dw[l];
    floatX *dresidual = m->dresidual;
    float *scratch = m->scratch;
    Matmul *mm = &m->matmul;
    cudaStream_t s = m->stream;

    // First recompute the buffers that forward did not keep: the whole layer from its
    // input, or only GELU's output from the hidden units.
    if (m->opt.recompute == RECOMPUTE_LAYER)
        layer_forward(m, l, a, NULL, x, B, T);
    if (m->opt.recompute == RECOMPUTE_GELU)
        gelu_forward(a->fch_gelu, a->fch, R * F, s);

    // The gradient of a token goes to its experts, weighted as their results were.
    const floatX *dout = dropout_backward(m->proj, dresidual,
                                          drop(m, DROPOUT_FCPROJ, l), Nl, C, s);
    moe_backward_router(m->dlogits, dout, a->expert_out, a->routing, m->moe, m->dloss, B, T,
                        C, s);
    moe_gather(m->rows, dout, a->routing, m->moe, B, C, true, s);
    exchange(m, m->arrived, m->rows, B, false);

    // an MLP of each expert
    for (size_t i = 0; i < El; i++) {
        size_t in = i * Re * C, hidden = i * Re * F, weight = i * C * F;
        const floatX *dy = m->arrived + in;
        floatX *dfch = m->dfch + hidden;
        matmul_backward_input(mm, dfch, dy, w[FCPROJW] + weight, Re, F, C);
        const floatX *fch_gelu = a->fch_gelu + hidden;
        matmul_backward_weight(mm, dw[FCPROJW] + weight, fch_gelu, dy, Re, F, C, add);
        bias_backward(dw[FCPROJB] + i * C, dy, scratch, Re, C, add, s);
        gelu_backward(dfch, dw[FCB] + i * F, scratch, dfch, a->fch + hidden, Re, F, add, s);
        matmul_backward_input(mm, m->rows + in, dfch, w[FCW] + weight, Re, C, F);
        matmul_backward_weight(mm, dw[FCW] + weight, a->expert_in + in, dfch, Re, C, F, add);
    }

    // Gradients of their inputs come back, and the router's joins them: of its losses for
    // balance and for small logits, too.
    exchange(m, m->arrived, m->rows, B, true);
    moe_backward_weight(dw[ROUTERW], scratch, m->dlogits, a->ln2.out, N, C, m->moe.E, add, s);
    moe_backward_input(m->dnorm, m->arrived, m->dlogits, w[ROUTERW], a->routing, m->moe, N, C,
                       s);

    // residual2 has gone past the experts as well as through it: both gradients add up.
    layernorm_backward(dresidual, dw[LN2W], dw[LN2B], scratch, dresidual, m->dnorm,
                       a->residual2, w[LN2W], a->ln2, Nl, C, add, s);

    // attention: its backward pass computes the scores again, which are too many to keep
    dout = dropout_backward(m->proj, dresidual, drop(m, DROPOUT_PROJ, l), Nl, C, s);
    matmul_backward_input(mm, m->dnorm, dout, w[PROJW], N, A, C);
    matmul_backward_weight(mm, dw[PROJW], a->atty, dout, N, A, C, add);
    bias_backward(dw[PROJB], dout, scratch, N, C, add, s);
    attention_backward(m->dqkv, m->dattention, m->dnorm, a->atty, a->lse, a->qkv,
                       B, T, A, m->NHl, s, drop(m, DROPOUT_SCORES, l));
    matmul_backward_input(mm, m->dnorm, m->dqkv, w[QKVW], N, C, 3 * A);
    matmul_backward_weight(mm, dw[QKVW], a->ln1.out, m->dqkv, N, C, 3 * A, add);
    bias_backward(dw[QKVB], m->dqkv, scratch, N, 3 * A, add, s);

    // x has gone past attention, too. dresidual is now the gradient of the layer before.
    layernorm_backward(dresidual, dw[LN1W], dw[LN1B], scratch, dresidual, m->dnorm,
                       x, w[LN1W], a->ln1, Nl, C, add, s);
}

// Runs the layers, tokens (B, T) -> lnf (Nl, C). The residual stream begins with a
// token's row of wte and its position's row of wpe.
static void forward(GPT *m, Acts *acts, const int *inputs, size_t B, size_t T, int micro) {
    size_t N = B * T, Nl = N / m->sp;
    size_t C = m->config.C, L = m->config.L;
    floatX **w = m->w[0];
    floatX *x = acts->residual[0];
    cudaStream_t s = m->stream;
    Span span(m, s, "forward", micro);

    // This is the only place where a token's position counts.
    use_bucket(m, 0);
    use_bucket(m, 1);
    encoder_forward(x, inputs, w[WTE], w[WPE], B, T, C, m->V0, m->Vl, s);
    dropout_forward(x, drop(m, DROPOUT_EMBEDDING, 0), Nl, C, s);

    for (size_t l = 0; l < L; l++) {
        // A layer's buckets: all but its experts, and these.
        use_bucket(m, BUCKET_LAYERS + 2 * l);
        use_bucket(m, BUCKET_LAYERS + 2 * l + 1);
        layer_forward(m, l, &acts->layers[l], acts->residual[l + 1], acts->residual[l],
                      B, T);
    }

    use_bucket(m, bucket_count(m) - 1);
    layernorm_forward(acts->lnf, acts->residual[L], w[LNFW], w[LNFB], Nl, C, s);
}

// Computes the micro-batch's losses from lnf (Nl, C). To train, the logits become their
// own gradient, softmax minus target. The gradient of the last layer's output goes to
// dresidual (Nl, C). Both are gradients of the step's mean loss.
static void loss_and_gradient(GPT *m, Acts *acts, const int *targets, int micro,
                              bool training) {
    size_t N = m->B * m->T, Nl = N / m->sp;
    size_t C = m->config.C, L = m->config.L;
    size_t V = m->config.V, Vl = m->Vl, V0 = m->V0;
    floatX **w = m->w[0];
    float **dw = m->dw[0];
    float *sum = m->row_sums;
    float *target = sum + N;
    float *losses = trainer_losses(m, micro);
    bool add = micro > 0;
    Matmul *mm = &m->matmul;
    cudaStream_t s = m->stream;
    Span span(m, s, "loss", micro);

    // The head is wte once more: [out, in], as the linear_ functions have it. A softmax by
    // its largest logit does not overflow.
    linear_forward(mm, m->logits, acts->lnf.out, w[WTE], NULL, N, C, Vl);
    classifier_stats(m->row_max, sum, target, m->logits, targets, N, V, Vl, V0, s);
    classifier_gradient(losses, m->logits, m->row_max, sum, target, targets,
                        m->dloss, N, V, Vl, V0, training, s);

    // Losses are summed in double and in a fixed order, so that the sum is reproducible.
    loss_sum(&m->loss_sums[micro], losses, N, s);
    if (!training) return;

    // Backward begins: through the head, and through the last layernorm.
    linear_backward_input(mm, m->dnorm, m->logits, w[WTE], N, C, Vl);
    linear_backward_weight(mm, dw[WTE], acts->lnf.out, m->logits, N, C, Vl, add);
    layernorm_backward(m->dresidual, dw[LNFW], dw[LNFB], m->scratch, NULL, m->dnorm,
                       acts->residual[L], w[LNFW], acts->lnf, Nl, C, add, s);
    if (reduce_now(m, micro))
        reduce_bucket(m, bucket_count(m) - 1);
}

// Computes the gradients of all layers and of the embeddings. Takes dresidual (Nl, C) as
// loss_and_gradient has left it. The matrix wte has two uses: the lookup's gradient adds
// to the head's.
static void backward(GPT *m, Acts *acts, const int *inputs, int micro) {
    size_t B = m->B, T = m->T, Nl = B * T / m->sp;
    size_t C = m->config.C, L = m->config.L;
    float **dw = m->dw[0];
    bool add = micro > 0;
    cudaStream_t s = m->stream;
    Span span(m, s, "backward", micro);

    for (size_t l = L; l-- > 0;) {
        layer_backward(m, l, &acts->layers[l], acts->residual[l], add);
        if (reduce_now(m, micro)) {
            reduce_bucket(m, BUCKET_LAYERS + 2 * l + 1);
            reduce_bucket(m, BUCKET_LAYERS + 2 * l);
        }
    }

    const floatX *dout = dropout_backward(m->dresidual, m->dresidual,
                                          drop(m, DROPOUT_EMBEDDING, 0), Nl, C, s);
    encoder_backward(dw[WTE], dw[WPE], dout, inputs, B, T, C, m->config.maxT, m->V0, m->Vl,
                     add, s);
}

// Runs all micro-batches of the global batch: with backward to train, without to validate.
// A micro-batch is as large as memory allows. The gradients of all are summed.
static void run_batch(GPT *m, bool training) {
    for (size_t micro = 0; micro < m->micros; micro++) {
        size_t at = micro * m->B * m->T;
        dropout_at(m, micro);
        forward(m, &m->acts, m->inputs + at, m->B, m->T, micro);
        loss_and_gradient(m, &m->acts, m->targets + at, micro, training);
        if (training)
            backward(m, &m->acts, m->inputs + at, micro);
    }
}

// ----------------------------------------------------------------------------------------
// The run

// Runs one step over the next global batch: forward, backward and update. The norm of all
// gradients together decides if AdamW clips them.
static void train_step(GPT *m) {
    StepReport report = trainer_begin_step(m);
    statistics_begin(m, &m->statistics);
    run_batch(m, true);

    // The embeddings are the last to be complete: the encoder adds to the head's gradient.
    for (size_t b = 0; b < bucket_count(m); b++) {
        bool begun = m->opt.overlap && b >= BUCKET_LAYERS;  // by backward
        if (!begun)
            reduce_bucket(m, b);
    }
    CUDA_CHECK(cudaEventRecord(m->reduced_all, m->data_stream));
    if (m->grid.d > 1)
        wait_for(m, m->reduced_all, "wait data");

    trainer_norm(m, &report);
    trainer_adamw(m, &report);
    gather_weights(m);
    trainer_end_step(m, &report);
    statistics_end(m, &m->statistics, m->moe);
}

// Appends one token to the sample. Attention looks back only, so the last of its T tokens
// has the logits of the next one, and tokens behind it (padding) do no harm.
static void sample_token(GPT *m) {
    size_t C = m->config.C, last = m->sample.T - 1;
    forward(m, &m->acts, m->inputs, 1, m->sample.padded, NO_MICRO);

    const floatX *lnf = m->acts.lnf.out;
    linear_forward(&m->matmul, m->logits, lnf + last * C, m->w[0][WTE], NULL, 1, C, m->Vl);
    sample_append(m, m->logits);
}

// Makes the communicators, with a stream for the sums and gathers, which overlap compute.
static void connect(GPT *m) {
    m->data = job_split_grid(&m->job, &m->grid, 'd', "data");
    m->data_stream = stream_create(m, "data", true);
    event_create(&m->bucket_done);
    event_create(&m->reduced_all);
    host_array(m->gathered_bucket, bucket_count(m));
    for (size_t b = 0; b < bucket_count(m); b++)
        event_create(&m->gathered_bucket[b]);

    size_t d = m->grid.d, e = m->experts.e, e_rank = m->grid.d_rank % e;
    m->alike = job_split_data(&m->job, &m->grid, e_rank, d / e, e, "expert data", false);
    trainer_warm_up(m, run_batch);
    m->exchanging = trainer_connect_data(m, m->grid.d_rank - e_rank, e, 1, "experts");
}

// Checks this lesson's flags, once all others have been checked.
static bool check_experts(Trainer *trainer, Error *err) {
    GPT *m = static_cast<GPT *>(trainer);
    MoeSpec *o = &m->experts;

    // The capacity changes the loss, as experts turn away more or fewer tokens. So the
    // checkpoint's capacity counts if the command line has none.
    moe_take_capacity(o, m->opt.resume != NULL, stdout);
    size_t slots = moe_capacity(o->capacity, m->opt.seq, o->k, o->E);
    m->moe = {o->E, o->k, slots, (float)o->balance, (float)o->z};
    return moe_check(o, m->grid.d, m->opt.zero, err);
}

int main(int argc, char **argv) {
    static GPT gpt, *m = &gpt;
    m->experts = moe_spec(8, 1);
    m->experts.capacity = 0;  // that of the command line, else the checkpoint's
    m->experts.model.read = moe_config_read;
    m->experts.model.write = moe_config_write;
    FieldTable rows = {MOE_OPTIONS, MOE_OPTION_ROWS, &m->experts};
    Lesson lesson = {rows, check_experts, &m->experts.model, NULL};
    trainer_open(m, argc, argv, OPTIONS_DATA, lesson);  // Bad input ends here.
    shard(m);
    trainer_allocate(m, layout);
    connect(m);
    trainer_start(m);

    // Between two steps come validation, a checkpoint and a sample, each when it is due.
    for (;;) {
        while (validation_goes_on(m))
            run_batch(m, false);
        if (save_due(m))
            trainer_save(m);
        while (sample_goes_on(m))
            sample_token(m);
        if (is_last_step(m))
            break;
        train_step(m);
    }
    return trainer_close(m);
}
