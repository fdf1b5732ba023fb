// train_context.cu: train_data.cu plus context parallelism: c neighbours of the d ranks share each sequence.
// parent: dev/lessons/train_data.cu
//
// Each of the c ranks has T/c tokens of a sequence. Only attention mixes tokens, in one of two ways. Ulysses (Jacobs et
// al. 2023): an all-to-all gives each rank all tokens of 1/c of the heads, and another one brings the outputs back.
// Ring (Liu et al. 2023): keys and values go round, while each rank attends to those at hand and merges the outputs.
//
// The d replicas share the global batch. A bucket of gradients (the embeddings, each layer, ln_f) is summed over them
// by a reduce-scatter. ZeRO-1: each data rank then owns 1/d of every bucket, whatever tensors that cuts, updates it,
// and the weights are gathered again while the next forward runs.
//
// Letters: B micro-batch (sequences), T sequence length, N = B*T tokens, C channels, L layers, NH heads, V vocabulary,
// Vp the same padded to 128. A rank has Nl rows of the residual stream, A channels of heads, F hidden units, Vl of Vp.
// A shape stands behind every pointer. Weights are [in, out]: w[QKVW] is one of a layer, dw[QKVW] its gradient
// (llmc/model.h). One rank has everything: Nl = N, A = C, F = 4C, Vl = Vp.

// Trainer: everything but the mathematics: options, memory, data, optimizer, checkpoints, log, timeline
#include "llmc/trainer.cuh"
#include "llmc/kernels/attention.cuh"
#include "llmc/kernels/classifier.cuh"
#include "llmc/kernels/context.cuh"
#include "llmc/kernels/encoder.cuh"
#include "llmc/kernels/gelu.cuh"
#include "llmc/kernels/layernorm.cuh"
#include "llmc/kernels/matmul.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// The model and its memory

// Activations of one layer: its forward pass keeps them for its backward pass.
struct LayerActs {
    Layernorm ln1;                 // (Nl, C), with mean and rstd (Nl)
    floatX *qkv;                   // (N, 3A); Ulysses: (B, cT, 3A/c), all tokens of 1/c of the heads
    float *lse;                    // (B, NH, T) of attention: log-sum-exp of the scores; Ulysses: (B, NH/c, cT)
    floatX *out;                   // (B, cT, A/c) Ulysses: attention's output, atty before it travels
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

// The flags of this lesson.
typedef struct {
    size_t context;
    int by, layout;
} ContextOptions;
static ContextOptions flags;
enum { BY_ULYSSES, BY_RING };
enum { LAYOUT_ZIGZAG, LAYOUT_CONTIGUOUS };
static const Field CONTEXT_OPTIONS[] = {
    {"Context parallelism", FIELD_TITLE, 0, NULL, 0, 0, OPTION_BASIC, NULL, NULL},
    {"context", FIELD_SIZE, offsetof(ContextOptions, context), "1", 1, 1e6, OPTION_BASIC, "N",
     "neighbours of the data ranks that share each sequence"},
    {"context-by", FIELD_CHOICE, offsetof(ContextOptions, by), "ulysses", 0, 0, OPTION_BASIC, "ulysses|ring",
     "how queries meet other ranks' keys"},
    {"context-layout", FIELD_CHOICE, offsetof(ContextOptions, layout), "zigzag", 0, 0, OPTION_BASIC,
     "zigzag|contiguous", "which tokens a rank has"},
};

struct GPT : Trainer {
    size_t c, c_rank;              // ranks that share a sequence, and this one's number among them
    bool zigzag;                   // this rank has chunks c_rank and 2c - 1 - c_rank of 2c, not part c_rank of c
    ncclComm_t context;            // these ranks
    bool connected;                // messages between them may be sent
    bool ulysses;                  // --context-by
    floatX *leaving, *arriving;    // (N, 3A) what an all-to-all sends and receives
    floatX *kv[2];                 // (N, 2A) the ring: keys and values at hand, and those that arrive
    float *dkv[2], *pair_dkv;      // (N, 2A) gradients of those at hand by the ranks before, and by this one
    float *sum, *pair_out, *pair_lse;  // (N, A) attention's output or dq so far, those by the keys at hand, (B, NH, T)
    cudaStream_t ring;
    cudaEvent_t computed, arrived; // the buffers may be sent and overwritten; what the ring brings is there
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
    floatX *dfch;                  // (N, F)
    float *dattention;             // (B, NH, T) scratch
    float *reduce_scratch;         // for the two-stage column sums
};

// Makes this data rank the owner of 1/d of every bucket: of the reduced gradients, and with ZeRO of the optimizer.
static void own_buckets(GPT *m, State *state) {
    for (size_t b = 0; b < bucket_count(m); b++) {
        size_t lo = m->table.buckets[b], part = (m->table.buckets[b + 1] - lo) / m->grid.d;
        state_own(state, lo + m->grid.d_rank * part, part);
    }
}

// Takes the whole model, in buckets that d ranks can share.
static void shard(GPT *m) {
    Shard part = shard_whole(&m->config);
    part.bucket_align = TENSOR_ALIGN * m->grid.d;
    trainer_shard(m, part);
    own_buckets(m, &m->part);
    if (m->opt.zero) own_buckets(m, &m->state);
}

// Takes memory for the activations of one micro-batch. With recomputation the layers share those of the first one.
static void layout_acts(GPT *m, Arena *arena, Acts *acts) {
    size_t N = m->B * m->T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F, L = m->config.L;
    host_array(acts->layers, L), host_array(acts->residual, L + 1);
    for (size_t l = 0; l <= L; l++) take(arena, acts->residual[l], Nl * C);
    for (size_t l = 0; l < L; l++) {
        LayerActs *a = &acts->layers[l], *first = &m->acts.layers[0];
        *a = *first;
        if (a != first && m->opt.recompute == RECOMPUTE_LAYER) continue;
        take_layernorm(arena, &a->ln1, Nl, C);
        take(arena, a->qkv, N * 3 * A), take(arena, a->lse, N * m->NH), take(arena, a->atty, N * A);
        take(arena, a->out, m->ulysses ? N * A : 0);
        take(arena, a->residual2, Nl * C);
        take_layernorm(arena, &a->ln2, Nl, C);
        take(arena, a->fch, N * F);
        if (a == first || m->opt.recompute == RECOMPUTE_NONE) take(arena, a->fch_gelu, N * F);
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
    take(arena, m->dqkv, N * 3 * A), take(arena, m->dfch, N * F), take(arena, m->dattention, N * m->NH);
    size_t all_to_all = m->ulysses ? N * A : 0, ring = m->c > 1 && !m->ulysses ? N * A : 0;
    take(arena, m->leaving, 3 * all_to_all), take(arena, m->arriving, 3 * all_to_all);
    for (int i = 0; i < 2; i++) take(arena, m->kv[i], 2 * ring), take(arena, m->dkv[i], 2 * ring);
    take(arena, m->pair_dkv, 2 * ring), take(arena, m->sum, ring), take(arena, m->pair_out, ring);
    take(arena, m->pair_lse, ring ? N * m->NH : 0);
    take(arena, m->reduce_scratch, reduce_scratch_floats(N, C, F));
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
    size_t lo = m->table.buckets[bucket], hi = m->table.buckets[bucket + 1], part = (hi - lo) / m->grid.d;
    float *grads = m->state.grads + lo, *mine = grads + m->grid.d_rank * part;
    if (m->grid.d == 1 || part == 0) return;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->data_stream, m->bucket_done, 0));
    Span span(m, m->data_stream, "reduce-scatter");
    NCCL_CHECK(ncclReduceScatter(grads, mine, part, ncclFloat, ncclSum, m->data, m->data_stream));
    if (!m->opt.zero) NCCL_CHECK(ncclAllGather(mine, grads, part, ncclFloat, m->data, m->data_stream));
}

// Gathers the updated weights of all buckets, in the order in which forward needs them.
static void gather_weights(GPT *m) {
    if (m->grid.d == 1 || !m->opt.zero) return;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->data_stream, m->bucket_done, 0));
    for (size_t b = 0; b < bucket_count(m); b++) {
        size_t lo = m->table.buckets[b], part = (m->table.buckets[b + 1] - lo) / m->grid.d;
        if (part == 0) continue;
        floatX *params = m->state.params + lo, *mine = params + m->grid.d_rank * part;
        Span span(m, m->data_stream, "all-gather");
        NCCL_CHECK(ncclAllGather(mine, params, part, NCCL_FLOATX, m->data, m->data_stream));
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
// Attention over the tokens of c ranks

// Sends part i of m->leaving[c, count] to rank i of the sequence, whose part arrives in place i of m->arriving.
static void all_to_all(GPT *m, size_t count) {
    if (!m->connected) return;
    Span span(m, m->stream, "all-to-all");
    trainer_copy(m, m->arriving + m->c_rank * count, m->leaving + m->c_rank * count, count);
    NCCL_CHECK(ncclGroupStart());
    for (size_t i = 0; i < m->c; i++) {
        if (i == m->c_rank) continue;
        NCCL_CHECK(ncclSend(m->leaving + i * count, count, NCCL_FLOATX, (int)i, m->context, m->stream));
        NCCL_CHECK(ncclRecv(m->arriving + i * count, count, NCCL_FLOATX, (int)i, m->context, m->stream));
    }
    NCCL_CHECK(ncclGroupEnd());
}

// Ulysses: local (N, parts, A), this rank's tokens, becomes whole (B, cT, parts, A/c), its heads of all tokens.
static void gather_tokens(GPT *m, floatX *whole, const floatX *local, size_t B, size_t T, size_t parts) {
    heads_cut(m->leaving, local, B * T, parts, m->A, m->c, m->stream);
    all_to_all(m, B * T * parts * m->A / m->c);
    tokens_join(whole, m->arriving, B, T * m->c, parts * m->A / m->c, m->c, m->zigzag, m->stream);
}

// The reverse: whole (B, cT, parts, A/c) becomes local (N, parts, A).
static void scatter_tokens(GPT *m, floatX *local, const floatX *whole, size_t B, size_t T, size_t parts) {
    tokens_cut(m->leaving, whole, B, T * m->c, parts * m->A / m->c, m->c, m->zigzag, m->stream);
    all_to_all(m, B * T * parts * m->A / m->c);
    heads_join(local, m->arriving, B * T, parts, m->A, m->c, m->stream);
}

// Attention's masks of this rank's heads: dropout numbers the heads of the whole model.
static Dropout drop_scores(const GPT *m, size_t l) {
    Dropout d = drop(m, DROPOUT_SCORES, l);
    d.head += m->c_rank * m->NH / m->c;
    return d;
}

// m->dqkv (N, 3A), the projection of this rank's tokens -> a->atty (N, A).
static void ulysses_forward(GPT *m, size_t l, LayerActs *a, size_t B, size_t T) {
    gather_tokens(m, a->qkv, m->dqkv, B, T, 3);
    attention_forward(a->out, a->lse, a->qkv, B, T * m->c, m->A / m->c, m->NH / m->c, m->stream, drop_scores(m, l));
    scatter_tokens(m, a->atty, a->out, B, T, 1);
}

// m->dnorm (N, A), the gradient of a->atty -> m->dqkv (N, 3A).
static void ulysses_backward(GPT *m, size_t l, LayerActs *a, size_t B, size_t T) {
    gather_tokens(m, m->proj, m->dnorm, B, T, 1);
    attention_backward(m->dfch, m->dattention, m->proj, a->out, a->lse, a->qkv, B, T * m->c, m->A / m->c,
                       m->NH / m->c, m->stream, drop_scores(m, l));
    scatter_tokens(m, m->dqkv, m->dfch, B, T, 3);
}

// Ring: while the keys and values of a step are at work, sends them to the next rank and receives those of the next
// step. Gradients follow one step behind: those of the step before go where their keys went.
static void ring_pass(GPT *m, size_t step, bool keys, bool gradients) {
    size_t count = m->B * m->T * 2 * m->A, c = m->c;
    int next = (int)((m->c_rank + 1) % c), previous = (int)((m->c_rank + c - 1) % c);
    if (!m->connected || (!keys && !gradients)) return;
    CUDA_CHECK(cudaEventRecord(m->computed, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->ring, m->computed, 0));
    Span span(m, m->ring, "ring");
    NCCL_CHECK(ncclGroupStart());
    if (keys) NCCL_CHECK(ncclSend(m->kv[step % 2], count, NCCL_FLOATX, next, m->context, m->ring));
    if (keys) NCCL_CHECK(ncclRecv(m->kv[(step + 1) % 2], count, NCCL_FLOATX, previous, m->context, m->ring));
    if (gradients) NCCL_CHECK(ncclSend(m->dkv[(step + 1) % 2], count, ncclFloat, next, m->context, m->ring));
    if (gradients) NCCL_CHECK(ncclRecv(m->dkv[step % 2], count, ncclFloat, previous, m->context, m->ring));
    NCCL_CHECK(ncclGroupEnd());
    CUDA_CHECK(cudaEventRecord(m->arrived, m->ring));
}

// Takes the pair of ranks of a step: this one's queries, and the keys of the rank that is `step` before it.
static TokenPair ring_pair(const GPT *m, size_t step, size_t B, size_t T, PairShape *shape) {
    size_t owner = (m->c_rank + m->c - step) % m->c;
    *shape = {B, T, m->A, m->NH, m->opt.seq, m->tokens, tokens_of(m->opt.seq, m->c, owner, m->zigzag)};
    return token_pair(T, m->c_rank, owner, m->zigzag);
}

// a->qkv (N, 3A) -> a->atty (N, A).
static void ring_forward(GPT *m, size_t l, LayerActs *a, size_t B, size_t T) {
    size_t A = m->A;
    Dropout d = drop(m, DROPOUT_SCORES, l);
    columns_move<false>(m->kv[0], 2 * A, a->qkv + A, 3 * A, B, T, 0, T, 2 * A, m->stream);
    for (size_t step = 0; step < m->c; step++) {
        PairShape shape;
        TokenPair pair = ring_pair(m, step, B, T, &shape);
        ring_pass(m, step, step + 1 < m->c, false);
        attention_pair_forward(step ? m->pair_out : m->sum, step ? m->pair_lse : a->lse, a->qkv, m->kv[step % 2], pair,
                               shape, m->stream, d);
        if (step) attention_merge(m->sum, a->lse, m->pair_out, m->pair_lse, pair, shape, m->stream);
        wait_for(m, m->arrived, "wait context");
    }
    columns_move<false>(a->atty, A, m->sum, A, B, T, 0, T, A, m->stream);
}

// m->dnorm (N, A), the gradient of a->atty -> m->dqkv (N, 3A). Backward needs no merging: it has the lse of all keys.
static void ring_backward(GPT *m, size_t l, LayerActs *a, size_t B, size_t T) {
    size_t A = m->A, c = m->c;
    Dropout d = drop(m, DROPOUT_SCORES, l);
    columns_move<false>(m->kv[0], 2 * A, a->qkv + A, 3 * A, B, T, 0, T, 2 * A, m->stream);
    for (size_t step = 0; step < c; step++) {
        PairShape shape;
        TokenPair pair = ring_pair(m, step, B, T, &shape);
        ring_pass(m, step, step + 1 < c, step > 0);
        attention_pair_backward(step ? m->pair_out : m->sum, step ? m->pair_dkv : m->dkv[0], m->dattention, m->dnorm,
                                a->atty, a->lse, a->qkv, m->kv[step % 2], pair, shape, m->stream, d);
        wait_for(m, m->arrived, "wait context");
        if (!step) continue;
        columns_move<true>(m->sum, A, m->pair_out, A, B, T, pair.q, pair.Tq, A, m->stream);
        columns_move<true>(m->dkv[step % 2], 2 * A, m->pair_dkv, 2 * A, B, T, pair.k, pair.Tk, 2 * A, m->stream);
    }
    ring_pass(m, c, false, true);  // home
    wait_for(m, m->arrived, "wait context");
    columns_move<false>(m->dqkv, 3 * A, m->sum, A, B, T, 0, T, A, m->stream);
    columns_move<false>(m->dqkv + A, 3 * A, m->dkv[c % 2], 2 * A, B, T, 0, T, 2 * A, m->stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward and backward

// One layer: x (Nl, C) -> out (Nl, C).
static void layer_forward(GPT *m, size_t l, LayerActs *a, floatX *out, const floatX *x, size_t B, size_t T) {
    size_t N = B * T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F;
    floatX **w = m->w[l];
    cudaStream_t s = m->stream;
    layernorm_forward(a->ln1, x, w[LN1W], w[LN1B], Nl, C, s);
    matmul_forward(&m->matmul, m->ulysses ? m->dqkv : a->qkv, a->ln1.out, w[QKVW], w[QKVB], N, C, 3 * A);
    if (m->ulysses) ulysses_forward(m, l, a, B, T);
    else if (m->c > 1) ring_forward(m, l, a, B, T);
    else attention_forward(a->atty, a->lse, a->qkv, B, T, A, m->NH, s, drop(m, DROPOUT_SCORES, l));
    matmul_forward(&m->matmul, m->proj, a->atty, w[PROJW], NULL, N, A, C);
    layernorm_residual_forward(a->residual2, a->ln2, x, m->reduced, w[PROJB], w[LN2W], w[LN2B], Nl, C, s,
                               drop(m, DROPOUT_PROJ, l));
    matmul_forward(&m->matmul, a->fch, a->ln2.out, w[FCW], w[FCB], N, C, F);
    gelu_forward(a->fch_gelu, a->fch, N * F, s);
    if (!out) return;  // recomputation: backward reads nothing of what follows
    matmul_forward(&m->matmul, m->proj, a->fch_gelu, w[FCPROJW], NULL, N, F, C);
    residual_forward(out, a->residual2, m->reduced, w[FCPROJB], Nl, C, s, drop(m, DROPOUT_FCPROJ, l));
}

// One layer: dresidual (Nl, C), the gradient of its output, becomes the gradient of its input x. The first micro-batch
// writes weight gradients and the others add to them (add).
static void layer_backward(GPT *m, size_t l, LayerActs *a, const floatX *x, bool add) {
    size_t B = m->B, T = m->T, N = B * T, Nl = N / m->sp, C = m->config.C, A = m->A, F = m->F;
    floatX **w = m->w[l], *dresidual = m->dresidual;
    float **dw = m->dw[l], *scratch = m->reduce_scratch;
    cudaStream_t s = m->stream;
    if (m->opt.recompute == RECOMPUTE_LAYER) layer_forward(m, l, a, NULL, x, B, T);
    if (m->opt.recompute == RECOMPUTE_GELU) gelu_forward(a->fch_gelu, a->fch, N * F, s);
    // the MLP
    const floatX *dout = dropout_backward(m->proj, dresidual, drop(m, DROPOUT_FCPROJ, l), Nl, C, s);
    matmul_backward_input(&m->matmul, m->dfch, dout, w[FCPROJW], N, F, C);
    matmul_backward_weight(&m->matmul, dw[FCPROJW], a->fch_gelu, dout, N, F, C, add);
    bias_backward(dw[FCPROJB], dout, scratch, N, C, add, s);
    gelu_backward(m->dfch, dw[FCB], scratch, m->dfch, a->fch, N, F, add, s);
    matmul_backward_input(&m->matmul, m->dnorm, m->dfch, w[FCW], N, C, F);
    matmul_backward_weight(&m->matmul, dw[FCW], a->ln2.out, m->dfch, N, C, F, add);
    layernorm_backward(dresidual, dw[LN2W], dw[LN2B], scratch, dresidual, m->dreduced, a->residual2, w[LN2W],
                       a->ln2, Nl, C, add, s);
    // the attention
    dout = dropout_backward(m->proj, dresidual, drop(m, DROPOUT_PROJ, l), Nl, C, s);
    matmul_backward_input(&m->matmul, m->dnorm, dout, w[PROJW], N, A, C);
    matmul_backward_weight(&m->matmul, dw[PROJW], a->atty, dout, N, A, C, add);
    bias_backward(dw[PROJB], dout, scratch, N, C, add, s);
    if (m->ulysses) ulysses_backward(m, l, a, B, T);
    else if (m->c > 1) ring_backward(m, l, a, B, T);
    else attention_backward(m->dqkv, m->dattention, m->dnorm, a->atty, a->lse, a->qkv, B, T, A, m->NH, s,
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
    encoder_forward(x, inputs, w[WTE], w[WPE], B, T, C, m->V0, m->Vl, m->stream, m->tokens);
    dropout_forward(x, drop(m, DROPOUT_EMBEDDING, 0), Nl, C, m->stream);
    for (size_t l = 0; l < L; l++) {
        use_bucket(m, 1 + l);
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
    head_forward(&m->matmul, m->logits, acts->lnf.out, w[WTE], N, C, m->Vl);
    classifier_stats(m->row_max, sum, target, m->logits, targets, N, V, m->Vl, m->V0, m->stream);
    classifier_gradient(losses, m->logits, m->row_max, sum, target, targets, m->dloss, N, V, m->Vl, m->V0, training,
                        m->stream);
    loss_sum(&m->loss_sums[micro], losses, N, m->stream);
    if (!training) return;
    head_backward_input(&m->matmul, m->dnorm, m->logits, w[WTE], N, C, m->Vl);
    head_backward_weight(&m->matmul, dw[WTE], acts->lnf.out, m->logits, N, C, m->Vl, add);
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
        if (reduce_now(m, micro)) reduce_bucket(m, 1 + l);
    }
    const floatX *dout = dropout_backward(dx, dx, drop(m, DROPOUT_EMBEDDING, 0), Nl, C, m->stream);
    encoder_backward(m->dw[0][WTE], m->dw[0][WPE], dout, inputs, B, T, C, m->config.maxT, m->V0, m->Vl, add, m->stream,
                     m->tokens);
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
    reduce_bucket(m, 0);  // the last to be complete: the encoder's gradient of wte adds to the head's
    for (size_t b = m->opt.overlap ? bucket_count(m) : 1; b < bucket_count(m); b++) reduce_bucket(m, b);
    CUDA_CHECK(cudaEventRecord(m->reduced_all, m->data_stream));
    if (m->grid.d > 1) wait_for(m, m->reduced_all, "wait data");
    trainer_norm(m, &report);
    trainer_adamw(m, &report);
    gather_weights(m);
    trainer_end_step(m, &report);
}

// Forward through a sequence that every rank has, as if it were alone.
static void forward_alone(GPT *m, size_t T) {
    size_t c = m->c;
    Tokens tokens = m->tokens;
    bool ulysses = m->ulysses;
    m->c = 1, m->ulysses = false, m->tokens = Tokens();
    forward(m, &m->acts, m->inputs, 1, T, NO_MICRO);
    m->c = c, m->ulysses = ulysses, m->tokens = tokens;
}

// Appends one token to the sample: the logits after the last of its T tokens say which.
static void sample_token(GPT *m) {
    size_t C = m->config.C, last = m->sample.T - 1;
    forward_alone(m, m->sample.padded);
    head_forward(&m->matmul, m->logits, m->acts.lnf.out + last * C, m->w[0][WTE], 1, C, m->Vl);
    sample_append(m, m->logits);
}

// Makes the communicators, and a stream for the one that overlaps compute.
static void connect(GPT *m) {
    m->data = job_split_grid(&m->job, &m->grid, 'd', "data");
    int *ranks = NULL;
    host_array(ranks, m->c);
    for (size_t i = 0; i < m->c; i++) ranks[i] = (int)(m->reader * m->c + i);
    m->context = job_split(&m->job, ranks, m->c, "context", 0, m->readers, true);
    free(ranks);
    event_create(&m->bucket_done), event_create(&m->reduced_all);
    host_array(m->gathered_bucket, bucket_count(m));
    for (size_t b = 0; b < bucket_count(m); b++) event_create(&m->gathered_bucket[b]);
    m->data_stream = stream_create(m, "data", true);
    m->ring = stream_create(m, "context", true);
    event_create(&m->computed), event_create(&m->arrived);
    trainer_warm_up(m);
    forward_alone(m, m->T);
    for (int micro = 0; micro < 2; micro++) {  // every kernel is loaded before a message is in flight
        trainer_set_dropout(m, micro == 1);
        forward(m, &m->acts, m->inputs, m->B, m->T, micro);
        loss(m, &m->acts, m->targets, micro, true);
        backward(m, &m->acts, m->inputs, micro);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    m->connected = true;
    if (m->ulysses) all_to_all(m, m->B * m->T * 3 * m->A / m->c);
    else if (m->c > 1) ring_pass(m, 0, true, true);
    CUDA_CHECK(cudaDeviceSynchronize());
}

static bool context_sizes(Options *o, const void *, Error *) {
    o->context = flags.context;
    return true;
}

// Refuses what this lesson's flags do not allow, and takes this rank's tokens.
static bool context_check(Trainer *trainer, Error *err) {
    GPT *m = (GPT *)trainer;
    size_t c = m->c = flags.context, parts = flags.layout == LAYOUT_ZIGZAG ? 2 * c : c;
    m->c_rank = m->grid.d_rank % c, m->zigzag = flags.layout == LAYOUT_ZIGZAG;
    m->tokens = tokens_of(m->opt.seq, c, m->c_rank, m->zigzag);
    if (c == 1) return true;
    if (m->opt.seq % parts)
        return error_set(err, "--seq %zu is not a multiple of %zu, the parts that --context %zu cuts it in: change one",
                         m->opt.seq, parts, c);
    m->ulysses = flags.by == BY_ULYSSES;
    if (m->ulysses && m->config.NH % c)
        return error_set(err, "--context %zu does not divide the %zu heads, which --context-by ulysses needs: take a "
                         "size that does, or --context-by ring", c, m->config.NH);
    if (!m->ulysses && m->opt.dropout > 0.0 && m->opt.seq / parts % DROPOUT_BLOCK)
        return error_set(err, "--dropout and --context-by ring need parts of a multiple of %d tokens, not %zu: change "
                         "--seq or take --context-by ulysses", DROPOUT_BLOCK, m->opt.seq / parts);
    return true;
}

int main(int argc, char **argv) {
    static GPT gpt, *m = &gpt;
    const FieldTable rows = {CONTEXT_OPTIONS, sizeof CONTEXT_OPTIONS / sizeof *CONTEXT_OPTIONS, &flags};
    trainer_open(m, argc, argv, OPTIONS_DATA, {rows, context_check, NULL, context_sizes});  // bad input ends here
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
