// train_muon.cu: train_data.cu with an optimizer that needs whole matrices.
// parent: dev/lessons/train_data.cu
//
// Muon (Jordan et al. 2024) makes the update of each weight matrix orthogonal, which takes
// the whole matrix. But ZeRO-1 cuts a bucket into d parts, even through a tensor. So a
// layer's matrices are dealt to the data ranks whole. A reduce takes a matrix's gradient to
// its owner. The owner updates the matrix, and broadcasts it while the next forward runs.
// The vectors beside a matrix go with it, but AdamW updates them. The embeddings and ln_f
// keep AdamW and ZeRO-1, as before.
//
// --distribute gathered keeps ZeRO-1's parts of layers, too. Then the updates of whole
// layers are gathered, and each rank orthogonalises every matrix that its part touches.
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
#include "llmc/trainer/ranks.cuh"
#include "llmc/kernels/attention.cuh"
#include "llmc/kernels/classifier.cuh"
#include "llmc/kernels/encoder.cuh"
#include "llmc/kernels/gelu.cuh"
#include "llmc/kernels/layernorm.cuh"
#include "llmc/kernels/matmul.cuh"
#include "llmc/kernels/muon.cuh"
#include "llmc/host/muon.h"
#include "llmc/trainer/momenta.cuh"

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
    floatX *fch;        // (N, F)       hidden units before GELU
    floatX *fch_gelu;   // (N, F)       and behind it
};

// A micro-batch keeps these from its forward to its backward pass.
struct Acts {
    LayerActs *layers;  // [L]
    floatX **residual;  // [L + 1] of (Nl, C): the input of each layer, and that of ln_f
    Layernorm lnf;      // (Nl, C)
};

struct GPT : Trainer {
    MuonOptions flags;
    MuonSpec spec;        // GPT-2, with the matrices of its layers marked
    MuonBlock *blocks;    // [L * LAYER_MATRICES] in memory order
    MuonScratch muon;     // of the matrix that becomes orthogonal

    ncclComm_t data;               // the d ranks, which all hold the whole model
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
    floatX *dfch;       // (N, F)
    float *dattention;  // (B, NHl, T)  scratch of attention's backward pass
    float *scratch;     // partial sums over rows, for gradients of biases and layernorms
};

// Returns the blocks of a bucket, or NULL if it is shared out by parts.
static const MuonBlock *blocks_of(const GPT *m, size_t bucket) {
    bool layer = bucket >= BUCKET_LAYERS && bucket + 1 < bucket_count(m);
    if (!layer || m->flags.distribute == DISTRIBUTE_GATHERED) return NULL;
    return &m->blocks[(bucket - BUCKET_LAYERS) * LAYER_MATRICES];
}

// Makes this data rank the owner of its blocks, and of 1/d of every other bucket.
static void own_buckets(GPT *m, State *state) {
    for (size_t b = 0; b < bucket_count(m); b++) {
        const MuonBlock *blocks = blocks_of(m, b);
        for (size_t i = 0; blocks && i < LAYER_MATRICES; i++) {
            if (blocks[i].owner == (int)m->grid.d_rank)
                state_own(state, blocks[i].lo, blocks[i].hi - blocks[i].lo);
        }
        if (blocks) continue;

        size_t lo = m->table.buckets[b], hi = m->table.buckets[b + 1];
        size_t part = (hi - lo) / m->grid.d;
        state_own(state, lo + m->grid.d_rank * part, part);
    }
}

// Takes the whole model, in buckets that d ranks can share.
static void shard(GPT *m) {
    Shard mine = shard_whole(&m->config);
    mine.bucket_align = TENSOR_ALIGN * m->grid.d;
    trainer_shard(m, mine);

    m->blocks = muon_blocks(&m->table);
    muon_deal(m->blocks, m->config.L * LAYER_MATRICES, m->grid.d);
    own_buckets(m, &m->share);
    own_buckets(m, &m->state);
    momenta_place(&m->state);
}

// Takes memory for the activations of one micro-batch. Recomputed activations live only
// while one layer is at work, so all layers can share the buffers of the first.
static void layout_acts(GPT *m, Arena *arena, Acts *acts) {
    size_t N = m->B * m->T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F;
    size_t L = m->config.L;
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
        take(arena, a->fch, N * F);
        if (m->opt.recompute == RECOMPUTE_GELU && a != first)
            a->fch_gelu = first->fch_gelu;
        else
            take(arena, a->fch_gelu, N * F);
    }
    take_layernorm(arena, &acts->lnf, Nl, C);
}

// Takes memory for every buffer: called once to count bytes, and once to set pointers, so
// that --dry-run prints the bytes that training takes.
static void layout(GPT *m) {
    size_t N = m->B * m->T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F;
    Arena *arena = trainer_layout(m);
    m->adamw_blocks = momenta_number(&m->state);

    // the largest matrix of an update
    take(arena, m->muon.x, F * C);
    take(arena, m->muon.product, F * C);
    take(arena, m->muon.square, C * C);
    take(arena, m->muon.combined, C * C);
    take(arena, m->muon.sums, F + 1);

    // the loss
    take(arena, m->logits, N * m->Vl);
    take(arena, m->row_max, N);
    take(arena, m->row_sums, 2 * N);

    // one layer at a time
    take(arena, m->proj, N * C);
    take(arena, m->dresidual, Nl * C);
    take(arena, m->dnorm, N * C);
    take(arena, m->dqkv, N * 3 * A);
    take(arena, m->dfch, N * F);
    take(arena, m->dattention, N * m->NHl);
    take(arena, m->scratch, reduce_scratch_floats(N, C, F));

    // all layers
    layout_acts(m, arena, &m->acts);
}

// ----------------------------------------------------------------------------------------
// Buckets: gradients are summed and weights are gathered over the data ranks

// Sums a bucket of gradients over the data ranks, on a stream of its own, so that it
// overlaps backward. Each rank gets the sum of its blocks, or of its part.
static void reduce_bucket(GPT *m, size_t bucket) {
    size_t lo = m->table.buckets[bucket], hi = m->table.buckets[bucket + 1];
    size_t part = (hi - lo) / m->grid.d;
    float *grads = m->state.grads + lo, *mine = grads + m->grid.d_rank * part;
    if (m->grid.d == 1 || part == 0) return;

    cudaStream_t s = m->data_stream;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(s, m->bucket_done, 0));
    const MuonBlock *blocks = blocks_of(m, bucket);
    Span span(m, s, blocks ? "reduce" : "reduce-scatter");
    if (!blocks) {
        NCCL_CHECK(ncclReduceScatter(grads, mine, part, ncclFloat, ncclSum, m->data, s));
        return;
    }
    NCCL_CHECK(ncclGroupStart());
    for (size_t i = 0; i < LAYER_MATRICES; i++) {
        float *block = m->state.grads + blocks[i].lo;
        size_t n = blocks[i].hi - blocks[i].lo;
        NCCL_CHECK(
            ncclReduce(block, block, n, ncclFloat, ncclSum, blocks[i].owner, m->data, s));
    }
    NCCL_CHECK(ncclGroupEnd());
}

// Gathers the updated weights of a bucket, after all of this rank's are written.
static void gather_weights(GPT *m, size_t bucket) {
    size_t lo = m->table.buckets[bucket], hi = m->table.buckets[bucket + 1];
    size_t part = (hi - lo) / m->grid.d;
    floatX *params = m->state.params + lo, *mine = params + m->grid.d_rank * part;
    if (m->grid.d == 1 || part == 0) return;

    cudaStream_t s = m->data_stream;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(s, m->bucket_done, 0));
    const MuonBlock *blocks = blocks_of(m, bucket);
    Span span(m, s, blocks ? "broadcast" : "all-gather");
    if (blocks) {
        NCCL_CHECK(ncclGroupStart());
        for (size_t i = 0; i < LAYER_MATRICES; i++) {
            floatX *block = m->state.params + blocks[i].lo;
            size_t n = blocks[i].hi - blocks[i].lo;
            NCCL_CHECK(
                ncclBroadcast(block, block, n, NCCL_FLOATX, blocks[i].owner, m->data, s));
        }
        NCCL_CHECK(ncclGroupEnd());
    } else {
        NCCL_CHECK(ncclAllGather(mine, params, part, NCCL_FLOATX, m->data, s));
    }
    CUDA_CHECK(cudaEventRecord(m->gathered_bucket[bucket], s));
    if (!m->opt.overlap)
        CUDA_CHECK(cudaStreamWaitEvent(m->stream, m->gathered_bucket[bucket], 0));
}

// Returns true if this micro-batch's backward completes buckets of gradients, and their sums
// may overlap the rest of backward.
static bool reduce_now(const GPT *m, int micro) {
    return m->opt.overlap && (size_t)micro + 1 == m->micros;
}

// Waits on the device until a bucket's weights have been gathered: called before they are
// read.
static void use_bucket(GPT *m, size_t bucket) {
    if (m->grid.d > 1)
        wait_for(m, m->gathered_bucket[bucket], "wait data");
}

// ----------------------------------------------------------------------------------------
// Forward and backward

// Runs one layer, x (Nl, C) -> out (Nl, C). Attention lets each token look at the tokens
// before it. The MLP looks at each token alone. Both add to the residual stream.
static void layer_forward(GPT *m, size_t l, LayerActs *a, floatX *out, const floatX *x,
                          size_t B, size_t T) {
    size_t N = B * T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F;
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

    // the MLP: four times as many hidden units as channels (F = 4C on a rank alone)
    matmul_forward(mm, a->fch, a->ln2.out, w[FCW], w[FCB], N, C, F);
    gelu_forward(a->fch_gelu, a->fch, N * F, s);
    if (!out) return;  // Backward computes a layer again up to here: it reads no more.

    matmul_forward(mm, m->proj, a->fch_gelu, w[FCPROJW], NULL, N, F, C);
    residual_forward(out, a->residual2, m->proj, w[FCPROJB], Nl, C, s,
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
        gelu_forward(a->fch_gelu, a->fch, N * F, s);

    // the MLP: a product's gradient for its input, then for its weight and for its bias
    const floatX *dout = dropout_backward(m->proj, dresidual,
                                          drop(m, DROPOUT_FCPROJ, l), Nl, C, s);
    matmul_backward_input(mm, m->dfch, dout, w[FCPROJW], N, F, C);
    matmul_backward_weight(mm, dw[FCPROJW], a->fch_gelu, dout, N, F, C, add);
    bias_backward(dw[FCPROJB], dout, scratch, N, C, add, s);
    gelu_backward(m->dfch, dw[FCB], scratch, m->dfch, a->fch, N, F, add, s);
    matmul_backward_input(mm, m->dnorm, m->dfch, w[FCW], N, C, F);
    matmul_backward_weight(mm, dw[FCW], a->ln2.out, m->dfch, N, C, F, add);

    // residual2 has gone past the MLP as well as through it: both gradients add up.
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
        use_bucket(m, BUCKET_LAYERS + l);
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
        if (reduce_now(m, micro))
            reduce_bucket(m, BUCKET_LAYERS + l);
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
// Muon: the update of matrices

// Turns the gradients of this rank's matrices, or of its parts of matrices, into updates.
// These are not orthogonal yet.
static void add_momentum(GPT *m, const StepReport *report) {
    const State *state = &m->state;
    double clip = m->opt.clip, norm = report->grad_norm;
    double scale = clip > 0.0 && norm > clip ? clip / norm : 1.0;
    Span span(m, m->stream, "optimizer");
    for (size_t i = 0; i < state->piece_count; i++) {
        Piece piece = state->host_pieces[i];
        if (muon_updates(&m->table.tensors[piece.tensor]))
            muon_momentum(state->grads + piece.lo, state->m + piece.at, piece.hi - piece.lo,
                          m->flags.momentum, scale, m->stream);
    }
}

// Gathers the updates of all layers, unless their matrices are whole: each rank has the
// part of its own gradients.
static void gather_updates(GPT *m) {
    if (m->grid.d == 1 || m->flags.distribute == DISTRIBUTE_WHOLE) return;
    cudaStream_t s = m->data_stream;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(s, m->bucket_done, 0));
    for (size_t b = BUCKET_LAYERS; b + 1 < bucket_count(m); b++) {
        size_t lo = m->table.buckets[b], hi = m->table.buckets[b + 1];
        size_t part = (hi - lo) / m->grid.d;
        float *updates = m->state.grads + lo, *mine = updates + m->grid.d_rank * part;
        Span span(m, s, "all-gather");
        NCCL_CHECK(ncclAllGather(mine, updates, part, ncclFloat, m->data, s));
        CUDA_CHECK(cudaEventRecord(m->gathered_bucket[b], s));
    }
}

// Makes the updates of a layer's matrices orthogonal and subtracts them. Takes the
// matrices that this rank owns, or of which it has a part.
static void update_matrices(GPT *m, size_t l, double lr) {
    const State *state = &m->state;
    cudaStream_t s = m->stream;
    if (m->flags.distribute == DISTRIBUTE_GATHERED)
        use_bucket(m, BUCKET_LAYERS + l);
    Span span(m, s, "optimizer");
    for (size_t i = 0; i < state->piece_count; i++) {
        Piece piece = state->host_pieces[i];
        const Tensor *x = &m->table.tensors[piece.tensor];
        if (!muon_updates(x) || x->held != l) continue;

        float *master = state->master ? state->master + piece.at : NULL;
        size_t lo = piece.first, hi = lo + piece.hi - piece.lo;
        for (size_t part = 0; part < muon_parts(x); part++) {
            MuonMatrix shape = muon_part(x, part);
            muon_normalise(&m->muon, state->grads + x->offset, shape, s);
            muon_orthogonalise(&m->muon, &m->matmul, shape, m->flags.steps);
            muon_update(state->params + x->offset, master, &m->muon, shape, lo, hi, lr,
                        m->opt.weight_decay, s);
        }
    }
}

// ----------------------------------------------------------------------------------------
// The run

// Runs one step over the next global batch: forward, backward and update. The norm of all
// gradients together says whether they are clipped.
static void train_step(GPT *m) {
    StepReport report = trainer_begin_step(m);
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
    add_momentum(m, &report);
    gather_updates(m);

    // Weights travel in the order in which forward needs them, while the matrices of the
    // next layer become orthogonal.
    for (size_t b = 0; b < bucket_count(m); b++) {
        if (b >= BUCKET_LAYERS && b + 1 < bucket_count(m))
            update_matrices(m, b - BUCKET_LAYERS, report.lr);
        gather_weights(m, b);
    }
    trainer_end_step(m, &report);
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

// Makes the communicator, with a stream of its own, as it overlaps compute.
static void connect(GPT *m) {
    m->data = job_split_grid(&m->job, &m->grid, 'd', "data");
    m->data_stream = stream_create(m, "data", true);
    event_create(&m->bucket_done);
    event_create(&m->reduced_all);
    host_array(m->gathered_bucket, bucket_count(m));
    for (size_t b = 0; b < bucket_count(m); b++)
        event_create(&m->gathered_bucket[b]);

    trainer_warm_up(m);
}

// Refuses options that only the parent has.
static bool check_muon(Trainer *m, Error *err) {
    return m->opt.zero || error_set(err, "--zero 0 keeps the optimizer whole on every rank: "
                                         "use train_data for that");
}

int main(int argc, char **argv) {
    static GPT gpt, *m = &gpt;
    muon_spec(&m->spec);
    Lesson lesson = {{MUON_OPTIONS, MUON_OPTION_ROWS, &m->flags}, check_muon, &m->spec.model, NULL};
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
