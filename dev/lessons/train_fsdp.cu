// train_fsdp.cu: train_data.cu with weights and gradients sharded, too.
// parent: dev/lessons/train_data.cu
//
// ZeRO stages 2 and 3 (Rajbhandari et al. 2020); FSDP (Zhao et al. 2023). The d ranks share
// the global batch. Each owns 1/d of every bucket (wte, wpe, each layer, ln_f), even where
// that cuts through a tensor. It keeps no other weights and gradients than this shard. With
// --replicas r (HSDP) only d/r neighbours share the model, and there are r copies of it.
//
// A layer computes in windows: its weights are gathered into one, and its gradients are
// summed from another into the shard, after each micro-batch. Layers l and l + 2 share both:
// while one window is at work, the other is filled or emptied. With --shard 2 the weights of
// each layer have a window of their own, and are gathered once a step.
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
#include "llmc/kernels/add.cuh"
#include "llmc/kernels/attention.cuh"
#include "llmc/kernels/classifier.cuh"
#include "llmc/kernels/encoder.cuh"
#include "llmc/kernels/gelu.cuh"
#include "llmc/kernels/layernorm.cuh"
#include "llmc/kernels/matmul.cuh"

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

enum { SHARD_2, SHARD_3 };  // choices of --shard

// This lesson's rows of the command line.
struct ShardOptions {
    int shard;        // SHARD_*
    size_t replicas;  // of the model, each sharded among its d/r data ranks
};

static const Field SHARD_OPTIONS[] = {
    {"shard", FIELD_CHOICE, offsetof(ShardOptions, shard), "3", 0, 0, OPTION_BASIC, "2|3",
     "2: weights are gathered once a step; 3: in each forward and backward"},
    {"replicas", FIELD_SIZE, offsetof(ShardOptions, replicas), "1", 1, 1e6, OPTION_BASIC, "N",
     "copies of the model, each sharded among neighbours of the data ranks"},
};

struct GPT : Trainer {
    ShardOptions flags;
    size_t shards;                 // s = d / replicas: ranks that share a copy of the model
    size_t shard_rank;             // this one's number among them
    size_t windows;                // layers whose weights have a window: 2, or all
    floatX **whole;                // [buckets] the window of its weights: (s, part)
    float **dwhole;                // [buckets] the window of its gradients: the same
    size_t *holds;                 // [buckets] of a window: 1 + the bucket in it; 0: none
    cudaEvent_t *reduced_window;   // [buckets] the same: its gradients may be overwritten

    ncclComm_t data;               // the s ranks, each of which holds 1/s of the model
    cudaStream_t data_stream;
    ncclComm_t replicas;           // the ranks that hold the same 1/s; NULL if there is one
    cudaStream_t replica_stream;
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

// Makes this data rank the owner of 1/s of every bucket.
static void own_buckets(GPT *m, State *state) {
    for (size_t b = 0; b < bucket_count(m); b++) {
        size_t lo = m->table.buckets[b], hi = m->table.buckets[b + 1];
        size_t part = (hi - lo) / m->shards;
        state_own(state, lo + m->shard_rank * part, part);
    }
}

// Takes 1/s of each bucket: of weights, gradients and optimizer. The shard has these parts one
// after the other, that of bucket b from buckets[b] / s on.
static void shard(GPT *m) {
    m->shards = m->grid.d / m->flags.replicas;
    m->shard_rank = m->grid.d_rank % m->shards;
    Shard mine = shard_whole(&m->config);
    mine.bucket_align = TENSOR_ALIGN * m->shards;
    trainer_shard(m, mine);

    // Of shards that are alike, the first replica's is saved and has its square in the norm.
    bool first = m->grid.d_rank < m->shards;
    for (size_t i = 0; i < m->table.count; i++)
        m->table.tensors[i].counted = first;

    m->share.sharded = true;
    m->state.sharded = true;
    own_buckets(m, &m->share);
    own_buckets(m, &m->state);
    m->windows = m->flags.shard == SHARD_2 || m->config.L < 2 ? m->config.L : 2;
}

// Returns the first bucket with the same window, where `count` layers have one. wte, wpe
// and ln_f have their own.
static size_t window_of(const GPT *m, size_t bucket, size_t count) {
    if (bucket < BUCKET_LAYERS || bucket + 1 == bucket_count(m)) return bucket;
    return BUCKET_LAYERS + (bucket - BUCKET_LAYERS) % count;
}

// Takes memory for the windows, and points the weights and gradients of each tensor into
// those of its bucket. A rank that shares a model with none has everything in its shard.
static void layout_windows(GPT *m) {
    size_t buckets = bucket_count(m), *at = m->table.buckets;
    host_array(m->whole, buckets);
    host_array(m->dwhole, buckets);
    host_array(m->holds, buckets);

    for (size_t b = 0; b < buckets; b++) {
        if (m->shards == 1) {
            m->whole[b] = m->state.params + at[b];
            m->dwhole[b] = m->state.grads + at[b];
            continue;
        }
        size_t w = window_of(m, b, m->windows), dw = window_of(m, b, 2);
        if (w == b)
            take(&m->weights, m->whole[b], at[b + 1] - at[b]);
        if (dw == b)
            take(&m->gradients, m->dwhole[b], at[b + 1] - at[b]);
        m->whole[b] = m->whole[w];
        m->dwhole[b] = m->dwhole[dw];
    }

    size_t b = 0;
    for (size_t i = 0; i < m->table.count; i++) {
        const Tensor *x = &m->table.tensors[i];
        while (x->offset >= at[b + 1]) b++;
        m->w[x->held][x->spec->kind] = m->whole[b] + (x->offset - at[b]);
        m->dw[x->held][x->spec->kind] = m->dwhole[b] + (x->offset - at[b]);
    }
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
    layout_windows(m);

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

// Lets stream `to` wait for all work that `from` has so far.
static void follow(GPT *m, cudaStream_t to, cudaStream_t from) {
    CUDA_CHECK(cudaEventRecord(m->bucket_done, from));
    CUDA_CHECK(cudaStreamWaitEvent(to, m->bucket_done, 0));
}

// Sums a bucket's shard, which has all micro-batches, over the replicas. It has a stream of
// its own: the sum may cross nodes, and the next layer's gather must not wait for it.
static void reduce_replicas(GPT *m, float *shard, size_t part) {
    cudaStream_t s = m->replica_stream;
    follow(m, s, m->data_stream);
    Span span(m, s, "all-reduce");
    NCCL_CHECK(ncclAllReduce(shard, shard, part, ncclFloat, ncclSum, m->replicas, s));
    if (!m->opt.overlap)
        follow(m, m->stream, s);
}

// Sums a bucket of gradients over the data ranks, on a stream of its own, so that it
// overlaps backward. Each rank gets its part of the sum in its shard, added to the
// micro-batches before (add). Replicas are summed once a step, behind its last micro-batch.
static void reduce_bucket(GPT *m, size_t bucket, bool add = false, bool last = true) {
    size_t lo = m->table.buckets[bucket], hi = m->table.buckets[bucket + 1];
    size_t part = (hi - lo) / m->shards;
    float *grads = m->dwhole[bucket], *mine = grads + m->shard_rank * part;
    float *kept = m->state.grads + lo / m->shards;
    if (m->grid.d == 1 || part == 0) return;

    cudaStream_t s = m->data_stream;
    follow(m, s, m->stream);
    if (m->shards > 1) {
        Span span(m, s, "reduce-scatter");
        float *sum = add ? mine : kept;
        NCCL_CHECK(ncclReduceScatter(grads, sum, part, ncclFloat, ncclSum, m->data, s));
        if (add)
            add_floats(kept, mine, part, s);
    }

    cudaEvent_t done = m->reduced_window[window_of(m, bucket, 2)];
    CUDA_CHECK(cudaEventRecord(done, s));
    if (!m->opt.overlap)
        CUDA_CHECK(cudaStreamWaitEvent(m->stream, done, 0));
    if (m->replicas && last)
        reduce_replicas(m, kept, part);
}

// Gathers the weights of buckets [first, behind) that are not in their windows. Compute is
// through with the weights that were there.
static void gather_buckets(GPT *m, size_t first, size_t behind) {
    if (m->shards == 1) return;
    cudaStream_t s = m->data_stream;
    follow(m, s, m->stream);
    for (size_t b = first; b < behind; b++) {
        size_t lo = m->table.buckets[b], hi = m->table.buckets[b + 1];
        size_t part = (hi - lo) / m->shards;
        if (part == 0) continue;
        floatX *params = m->whole[b], *mine = m->state.params + lo / m->shards;
        size_t *holds = &m->holds[window_of(m, b, m->windows)];
        if (*holds == 1 + b) continue;
        *holds = 1 + b;
        Span span(m, s, "all-gather");
        NCCL_CHECK(ncclAllGather(mine, params, part, NCCL_FLOATX, m->data, s));
        CUDA_CHECK(cudaEventRecord(m->gathered_bucket[b], s));
        if (!m->opt.overlap)
            CUDA_CHECK(cudaStreamWaitEvent(m->stream, m->gathered_bucket[b], 0));
    }
}

// Gathers the updated weights of all windows, in the order in which forward needs them.
static void gather_weights(GPT *m) {
    memset(m->holds, 0, bucket_count(m) * sizeof *m->holds);
    gather_buckets(m, 0, BUCKET_LAYERS + m->windows);
    gather_buckets(m, bucket_count(m) - 1, bucket_count(m));
}

// Returns true if this micro-batch's loss completes the gradients of ln_f, and their sum may
// overlap the rest of backward.
static bool reduce_now(const GPT *m, int micro) {
    return m->opt.overlap && (size_t)micro + 1 == m->micros;
}

// Waits on the device until a bucket's weights have been gathered: called before they are
// read.
static void use_bucket(GPT *m, size_t bucket) {
    if (m->shards > 1)
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

    // Backward has left the first layers in their windows, and validation the last ones.
    gather_buckets(m, BUCKET_LAYERS, BUCKET_LAYERS + m->windows);
    for (size_t l = 0; l < L; l++) {
        use_bucket(m, BUCKET_LAYERS + l);
        layer_forward(m, l, &acts->layers[l], acts->residual[l + 1], acts->residual[l],
                      B, T);
        size_t ahead = BUCKET_LAYERS + l + m->windows;
        if (l + m->windows < L)
            gather_buckets(m, ahead, ahead + 1);
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
    bool add = micro > 0, last = (size_t)micro + 1 == m->micros;
    cudaStream_t s = m->stream;
    Span span(m, s, "backward", micro);

    for (size_t l = L; l-- > 0;) {
        use_bucket(m, BUCKET_LAYERS + l);
        size_t window = window_of(m, BUCKET_LAYERS + l, 2);
        wait_for(m, m->reduced_window[window], "wait data");
        bool in_shard = m->shards == 1;
        layer_backward(m, l, &acts->layers[l], acts->residual[l], add && in_shard);

        // Layer l - 2 waits for both: for the window of gradients that this sum empties, and
        // for its weights.
        reduce_bucket(m, BUCKET_LAYERS + l, add, last);
        size_t ahead = BUCKET_LAYERS + l - m->windows;
        if (l >= m->windows)
            gather_buckets(m, ahead, ahead + 1);
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
    run_batch(m, true);

    // The embeddings are the last to be complete: the encoder adds to the head's gradient.
    for (size_t b = 0; b < BUCKET_LAYERS; b++)
        reduce_bucket(m, b);
    if (!m->opt.overlap)
        reduce_bucket(m, bucket_count(m) - 1);
    cudaStream_t sums = m->replicas ? m->replica_stream : m->data_stream;
    CUDA_CHECK(cudaEventRecord(m->reduced_all, sums));
    if (m->grid.d > 1)
        wait_for(m, m->reduced_all, "wait data");

    trainer_norm(m, &report);
    trainer_adamw(m, &report);
    gather_weights(m);
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

// Makes the communicators, with a stream for each, as they overlap compute. Neighbours
// share a copy of the model, since they communicate in every micro-batch.
static void connect(GPT *m) {
    size_t s = m->shards, r = m->flags.replicas;
    size_t first = m->grid.d_rank - m->shard_rank;
    m->data = job_split_data(&m->job, &m->grid, first, s, 1, "data", false);
    m->data_stream = stream_create(m, "data", true);
    if (r > 1) {
        m->replicas = job_split_data(&m->job, &m->grid, m->shard_rank, r, s, "replicas", false);
        m->replica_stream = stream_create(m, "replicas", true);
    }
    event_create(&m->bucket_done);
    event_create(&m->reduced_all);
    host_array(m->gathered_bucket, bucket_count(m));
    host_array(m->reduced_window, bucket_count(m));
    for (size_t b = 0; b < bucket_count(m); b++) {
        event_create(&m->gathered_bucket[b]);
        event_create(&m->reduced_window[b]);
    }

    trainer_warm_up(m);
}

// Refuses options that only the parent has, and replicas of unequal size.
static bool check_shard(Trainer *trainer, Error *err) {
    const GPT *m = (GPT *)trainer;
    if (!m->opt.zero)
        return error_set(err, "--zero 0 keeps the optimizer whole on every rank: "
                              "use train_data for that");
    return m->grid.d % m->flags.replicas == 0 ||
           error_set(err, "--replicas %zu must divide the %zu data ranks", m->flags.replicas,
                     m->grid.d);
}

int main(int argc, char **argv) {
    static GPT gpt, *m = &gpt;
    Lesson lesson = {{SHARD_OPTIONS, 2, &m->flags}, check_shard, NULL, NULL};
    trainer_open(m, argc, argv, OPTIONS_DATA, lesson);  // Bad input ends here.
    shard(m);
    trainer_allocate(m, layout);
    connect(m);
    trainer_start(m);
    gather_weights(m);

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
