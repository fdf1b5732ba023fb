// train_context.cu: train_data.cu plus context parallelism: c neighbours of the d ranks share each sequence.
// parent: dev/lessons/train_data.cu
//
// Each of the c ranks has T/c tokens of a sequence. Only attention mixes tokens, in one of two ways. Ulysses (Jacobs et
// al. 2023): an all-to-all gives each rank all tokens of 1/c of the heads, and another one brings the outputs back.
// Ring (Liu et al. 2023): keys and values go round, while each rank attends to those at hand and merges the outputs.
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
#include "llmc/kernels/context.cuh"
#include "llmc/kernels/encoder.cuh"
#include "llmc/kernels/gelu.cuh"
#include "llmc/kernels/layernorm.cuh"
#include "llmc/kernels/matmul.cuh"
#include "llmc/trainer/split_data.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// The model and its memory

// Activations of one layer: its forward pass keeps them for its backward pass.
struct LayerActs {
    Layernorm ln1;                 // (Nl, C), with mean and rstd (Nl)
    floatX *qkv;                   // (N, 3A)
    float *lse;                    // (B, NH, T) of attention: log-sum-exp of the scores
    floatX *out;                   // (B, cT, A/c) Ulysses: atty before it travels; qkv and lse are of these heads, too
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
    Context own, cut;              // this rank's part of each sequence, and of those at hand: all of a sample
    ncclComm_t context;            // the ranks that share it
    bool connected;                // messages between them may be sent
    floatX *leaving, *arriving;    // (N, 3A) what an all-to-all sends and receives
    Ring ring;                     // keys, values and their gradients, which go round
    cudaStream_t ring_stream;
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
        int again = a == first ? RECOMPUTE_NONE : m->opt.recompute;  // what backward computes again
        *a = *first;
        if (again < RECOMPUTE_LAYER) take(arena, a->lse, N * m->NH), take(arena, a->atty, N * A);
        if (again < RECOMPUTE_LAYER) take(arena, a->out, context_is_ulysses(m->cut) ? N * A : 0);
        if (again < RECOMPUTE_GELU) take(arena, a->fch_gelu, N * F);
        if (again >= RECOMPUTE_REST) continue;
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
    take(arena, m->dqkv, N * 3 * A), take(arena, m->dfch, N * F), take(arena, m->dattention, N * m->NH);
    size_t all_to_all = context_is_ulysses(m->cut) ? N * A : 0, ring = context_is_ring(m->cut) ? N : 0;
    take(arena, m->leaving, 3 * all_to_all), take(arena, m->arriving, 3 * all_to_all);
    take_ring(arena, &m->ring, ring, A, m->NH);
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
    trainer_copy(m, m->arriving + m->cut.rank * count, m->leaving + m->cut.rank * count, count);
    NCCL_CHECK(ncclGroupStart());
    for (size_t i = 0; i < m->cut.c; i++) {
        if (i == m->cut.rank) continue;
        NCCL_CHECK(ncclSend(m->leaving + i * count, count, NCCL_FLOATX, (int)i, m->context, m->stream));
        NCCL_CHECK(ncclRecv(m->arriving + i * count, count, NCCL_FLOATX, (int)i, m->context, m->stream));
    }
    NCCL_CHECK(ncclGroupEnd());
}

// Ulysses: local (N, parts, A), this rank's tokens, becomes whole (B, cT, parts, A/c), its heads of all tokens.
static void gather_tokens(GPT *m, floatX *whole, const floatX *local, size_t B, size_t T, size_t parts) {
    size_t c = m->cut.c;
    heads_cut(m->leaving, local, B * T, parts, m->A, c, m->stream);
    all_to_all(m, B * T * parts * m->A / c);
    tokens_join(whole, m->arriving, B, T * c, parts * m->A / c, c, m->cut.zigzag, m->stream);
}

// The reverse: whole (B, cT, parts, A/c) becomes local (N, parts, A).
static void scatter_tokens(GPT *m, floatX *local, const floatX *whole, size_t B, size_t T, size_t parts) {
    size_t c = m->cut.c;
    tokens_cut(m->leaving, whole, B, T * c, parts * m->A / c, c, m->cut.zigzag, m->stream);
    all_to_all(m, B * T * parts * m->A / c);
    heads_join(local, m->arriving, B * T, parts, m->A, c, m->stream);
}

// Ring: while the keys and values of a step are at work, sends them to the next rank and receives those of the next
// step. Gradients follow one step behind: the step before sends its own where their keys went.
static void ring_pass(GPT *m, size_t step, bool keys, bool gradients) {
    size_t count = m->B * m->T * 2 * m->A, c = m->cut.c;
    int next = (int)((m->cut.rank + 1) % c), previous = (int)((m->cut.rank + c - 1) % c);
    if (!m->connected || (!keys && !gradients)) return;
    Ring &r = m->ring;
    cudaStream_t s = m->ring_stream;
    CUDA_CHECK(cudaEventRecord(m->computed, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(s, m->computed, 0));
    Span span(m, s, "ring");
    NCCL_CHECK(ncclGroupStart());
    if (keys) NCCL_CHECK(ncclSend(r.kv[step % 2], count, NCCL_FLOATX, next, m->context, s));
    if (keys) NCCL_CHECK(ncclRecv(r.kv[(step + 1) % 2], count, NCCL_FLOATX, previous, m->context, s));
    if (gradients) NCCL_CHECK(ncclSend(r.dkv[(step + 1) % 2], count, ncclFloat, next, m->context, s));
    if (gradients) NCCL_CHECK(ncclRecv(r.dkv[step % 2], count, ncclFloat, previous, m->context, s));
    NCCL_CHECK(ncclGroupEnd());
    CUDA_CHECK(cudaEventRecord(m->arrived, s));
}

// a->qkv (N, 3A) -> a->atty (N, A).
static void ring_forward(GPT *m, LayerActs *a, size_t B, size_t T, Dropout d) {
    size_t A = m->A;
    columns_move<false>(m->ring.kv[0], 2 * A, a->qkv + A, 3 * A, B, T, 0, T, 2 * A, m->stream);
    for (size_t step = 0; step < m->cut.c; step++) {
        RingStep now = ring_step(m->cut, step, B, T, A, m->NH);
        ring_pass(m, step, step + 1 < m->cut.c, false);
        attention_pair_forward(m->ring, a->lse, a->qkv, now, m->stream, d);
        attention_merge(m->ring, a->lse, now, m->stream);
        wait_for(m, m->arrived, "wait context");
    }
    columns_move<false>(a->atty, A, m->ring.sum, A, B, T, 0, T, A, m->stream);
}

// m->dnorm (N, A), the gradient of a->atty -> m->dqkv (N, 3A). Backward needs no merging: it has the lse of all keys.
static void ring_backward(GPT *m, LayerActs *a, size_t B, size_t T, Dropout d) {
    size_t A = m->A, c = m->cut.c;
    columns_move<false>(m->ring.kv[0], 2 * A, a->qkv + A, 3 * A, B, T, 0, T, 2 * A, m->stream);
    for (size_t step = 0; step < c; step++) {
        RingStep now = ring_step(m->cut, step, B, T, A, m->NH);
        ring_pass(m, step, step + 1 < c, step > 0);
        attention_pair_backward(m->ring, m->dattention, m->dnorm, a->atty, a->lse, a->qkv, now, m->stream, d);
        wait_for(m, m->arrived, "wait context");
        ring_add(m->ring, now, m->stream);
    }
    ring_pass(m, c, false, true);  // home
    wait_for(m, m->arrived, "wait context");
    columns_move<false>(m->dqkv, 3 * A, m->ring.sum, A, B, T, 0, T, A, m->stream);
    columns_move<false>(m->dqkv + A, 3 * A, m->ring.dkv[c % 2], 2 * A, B, T, 0, T, 2 * A, m->stream);
}

// a->qkv (N, 3A), of this rank's tokens -> a->atty (N, A). kept: for backward, which has that and needs a->qkv again.
static void context_forward(GPT *m, LayerActs *a, size_t B, size_t T, Dropout d, bool kept) {
    size_t c = m->cut.c, A = m->A, NH = m->NH;
    bool ulysses = context_is_ulysses(m->cut);
    if (ulysses) gather_tokens(m, a->qkv, a->qkv, B, T, 3);
    if (kept) return;
    if (context_is_ring(m->cut)) return ring_forward(m, a, B, T, d);
    if (!ulysses) return attention_forward(a->atty, a->lse, a->qkv, B, T, A, NH, m->stream, d);
    attention_forward(a->out, a->lse, a->qkv, B, T * c, A / c, NH / c, m->stream, d);
    scatter_tokens(m, a->atty, a->out, B, T, 1);
}

// m->dnorm (N, A), the gradient of a->atty -> m->dqkv (N, 3A).
static void context_backward(GPT *m, LayerActs *a, size_t B, size_t T, Dropout d) {
    size_t c = m->cut.c, A = m->A, NH = m->NH;
    if (context_is_ring(m->cut)) return ring_backward(m, a, B, T, d);
    if (!context_is_ulysses(m->cut))
        return attention_backward(m->dqkv, m->dattention, m->dnorm, a->atty, a->lse, a->qkv, B, T, A, NH, m->stream, d);
    gather_tokens(m, m->proj, m->dnorm, B, T, 1);
    attention_backward(m->dfch, m->dattention, m->proj, a->out, a->lse, a->qkv, B, T * c, A / c, NH / c, m->stream, d);
    scatter_tokens(m, m->dqkv, m->dfch, B, T, 3);
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
    bool kept = !out && m->opt.recompute == RECOMPUTE_REST;  // what attention wrote
    context_forward(m, a, B, T, context_dropout(drop(m, DROPOUT_SCORES, l), m->cut, m->NH), kept);
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
    if (m->opt.recompute >= RECOMPUTE_REST) layer_forward(m, l, a, NULL, x, B, T);
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
    context_backward(m, a, B, T, context_dropout(drop(m, DROPOUT_SCORES, l), m->cut, m->NH));
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
    m->cut = micro == NO_MICRO ? Context() : m->own;  // each rank samples alone
    use_bucket(m, 0);
    use_bucket(m, 1);
    encoder_forward(x, inputs, w[WTE], w[WPE], B, T, C, m->V0, m->Vl, m->stream, context_tokens(m->cut));
    dropout_forward(x, drop(m, DROPOUT_EMBEDDING, 0), Nl, C, m->stream);
    for (size_t l = 0; l < L; l++) {
        use_bucket(m, 2 + l);
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
        if (reduce_now(m, micro)) reduce_bucket(m, 2 + l);
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
    // With overlap those of wte and wpe are left, which the encoder's gradient completes.
    for (size_t b = 0; b < (m->opt.overlap ? 2 : bucket_count(m)); b++) reduce_bucket(m, b);
    CUDA_CHECK(cudaEventRecord(m->reduced_all, m->data_stream));
    if (m->grid.d > 1) wait_for(m, m->reduced_all, "wait data");
    trainer_norm(m, &report);
    trainer_adamw(m, &report);
    gather_weights(m);
    trainer_end_step(m, &report);
}

// Appends one token to the sample: the logits after the last of its T tokens say which.
static void sample_token(GPT *m) {
    size_t C = m->config.C, last = m->sample.T - 1;
    forward(m, &m->acts, m->inputs, 1, m->sample.padded, NO_MICRO);
    linear_forward(&m->matmul, m->logits, m->acts.lnf.out + last * C, m->w[0][WTE], NULL, 1, C, m->Vl);
    sample_append(m, m->logits);
}

// Makes the communicators, and a stream for the one that overlaps compute.
static void connect(GPT *m) {
    m->data = job_split_grid(&m->job, &m->grid, 'd', "data");
    m->context = job_split_data(&m->job, &m->grid, m->grid.d_rank - m->cut.rank, m->cut.c, 1, "context", true);
    event_create(&m->bucket_done), event_create(&m->reduced_all);
    host_array(m->gathered_bucket, bucket_count(m));
    for (size_t b = 0; b < bucket_count(m); b++) event_create(&m->gathered_bucket[b]);
    m->data_stream = stream_create(m, "data", true);
    m->ring_stream = stream_create(m, "context", true);
    event_create(&m->computed), event_create(&m->arrived);
    trainer_warm_up(m);
    forward(m, &m->acts, m->inputs, 1, m->T, NO_MICRO);
    for (int micro = 0; micro < 2; micro++) {  // every kernel is loaded before a message is in flight
        trainer_set_dropout(m, micro == 1);
        forward(m, &m->acts, m->inputs, m->B, m->T, micro);
        loss(m, &m->acts, m->targets, micro, true);
        backward(m, &m->acts, m->inputs, micro);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    m->connected = true;
    if (context_is_ulysses(m->cut)) all_to_all(m, m->B * m->T * 3 * m->A / m->cut.c);
    if (context_is_ring(m->cut)) ring_pass(m, 0, true, true);
    CUDA_CHECK(cudaDeviceSynchronize());
}

// Checks this lesson's flags, once all others have been checked, and takes this rank's tokens.
static bool check_context(Trainer *trainer, Error *err) {
    GPT *m = static_cast<GPT *>(trainer);
    m->own.T = m->opt.seq, m->own.rank = m->grid.d_rank % m->own.c;
    m->cut = m->own, m->tokens = context_tokens(m->own);
    return context_check(m->own, m->config.NH, m->opt.dropout > 0.0, err);
}

int main(int argc, char **argv) {
    static GPT gpt, *m = &gpt;
    Lesson lesson = {{CONTEXT_OPTIONS, CONTEXT_OPTION_ROWS, &m->own}, check_context, NULL, context_sizes};
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
