// train_fsdp.cu: train_data.cu with gradients and weights sharded, too (ZeRO stages 2 and 3; FSDP, Zhao et al. 2023).
// parent: dev/lessons/train_data.cu
//
// The d replicas share the global batch. A bucket of gradients (wte, wpe, each layer, ln_f) is summed over them
// by a reduce-scatter. ZeRO-1: each data rank then owns 1/d of every bucket, whatever tensors that cuts, updates it,
// and the weights are gathered again while the next forward runs.
//
// Here a rank keeps no more than that of weights and gradients: its shard. A layer computes in windows: its weights are
// gathered into one, and its gradients are summed from another into the shard, after each micro-batch. Layers l and
// l + 2 share both: while one computes, the next is gathered. With --shard 2 each layer's weights have their own.
//
// Letters: B micro-batch (sequences), T sequence length, N = B*T tokens, C channels, L layers, NH heads, V vocabulary,
// Vp the same padded to 128. A rank has Nl rows of the residual stream, A channels of heads, F hidden units, Vl of Vp.
// A shape stands behind every pointer. Weights are [in, out]: w[QKVW] is one of a layer, dw[QKVW] its gradient
// (llmc/model.h). One rank has everything: Nl = N, A = C, F = 4C, Vl = Vp.

// Trainer: everything but the mathematics: options, memory, data, optimizer, checkpoints, log, timeline
#include "llmc/trainer/ranks.cuh"  // with trainer.cuh
#include "llmc/kernels/add.cuh"
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

enum { SHARD_2, SHARD_3 };  // choices of --shard

// This lesson's rows of the command line.
struct ShardOptions {
    int shard;                     // SHARD_*
};

static const Field SHARD_OPTIONS[] = {
    {"shard", FIELD_CHOICE, offsetof(ShardOptions, shard), "3", 0, 0, OPTION_BASIC, "2|3",
     "2: weights are gathered once a step; 3: in each forward and backward"},
};

struct GPT : Trainer {
    ncclComm_t data;               // the d ranks, which all hold the whole model
    cudaStream_t data_stream;
    cudaEvent_t bucket_done, reduced_all;  // gradients of a bucket are complete; all buckets are reduced
    cudaEvent_t *gathered_bucket;  // [buckets] its weights are up to date on every data rank
    cudaEvent_t *reduced_window;   // [buckets] the gradients in its window are summed: backward may write others there
    ShardOptions own;
    size_t windows;                // layers whose weights have a window: 2, or all with --shard 2
    floatX **whole;                // [buckets] the window of its weights, all of them: (d, part)
    float **dwhole;                // [buckets] the window of its gradients
    size_t *holds;                 // [buckets] of a window, named by its first bucket: 1 + the bucket it holds, 0: none

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
// The part of bucket b is [buckets[b] / d, buckets[b + 1] / d) of the shard.
static void shard(GPT *m) {
    Shard part = shard_whole(&m->config);
    part.bucket_align = TENSOR_ALIGN * m->grid.d;
    trainer_shard(m, part);
    m->part.sharded = m->state.sharded = true;
    own_buckets(m, &m->part);
    if (m->opt.zero) own_buckets(m, &m->state);
    m->windows = m->own.shard == SHARD_2 || m->config.L < 2 ? m->config.L : 2;
}

// Returns the first bucket with the same window, where `count` layers have one: the embeddings and ln_f have their own.
static size_t window_of(const GPT *m, size_t bucket, size_t count) {
    return bucket < 2 || bucket + 1 == bucket_count(m) ? bucket : 2 + (bucket - 2) % count;
}

// Takes memory for the windows, and points the weights and gradients of each tensor into the one of its bucket. A rank
// alone has everything in its shard.
static void layout_windows(GPT *m) {
    size_t buckets = bucket_count(m), *at = m->table.buckets, b = 0;
    host_array(m->whole, buckets), host_array(m->dwhole, buckets), host_array(m->holds, buckets);
    for (size_t i = 0; i < buckets; i++) {
        size_t w = window_of(m, i, m->windows), dw = window_of(m, i, 2), size = at[i + 1] - at[i];
        if (w == i && m->grid.d > 1) take(&m->weights, m->whole[i], size);
        if (dw == i && m->grid.d > 1) take(&m->gradients, m->dwhole[i], size);
        m->whole[i] = m->grid.d > 1 ? m->whole[w] : m->state.params + at[i];
        m->dwhole[i] = m->grid.d > 1 ? m->dwhole[dw] : m->state.grads + at[i];
    }
    for (size_t i = 0; i < m->table.count; i++) {
        const Tensor *x = &m->table.tensors[i];
        size_t l = x->held;
        while (x->offset >= at[b + 1]) b++;
        m->w[l][x->spec->kind] = m->whole[b] + (x->offset - at[b]);
        m->dw[l][x->spec->kind] = m->dwhole[b] + (x->offset - at[b]);
    }
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
    layout_windows(m);
    take(arena, m->logits, N * m->Vl);
    take(arena, m->row_max, N), take(arena, m->row_sums, 2 * N);
    take(arena, m->proj, N * C), take(arena, m->dresidual, Nl * C), take(arena, m->dnorm, N * C);
    m->reduced = m->proj, m->dreduced = m->dnorm;
    take(arena, m->dqkv, N * 3 * A), take(arena, m->dfch, N * F), take(arena, m->dattention, N * m->NH);
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
// its part in its shard, added (add) to the micro-batches before.
static void reduce_bucket(GPT *m, size_t bucket, bool add = false) {
    size_t lo = m->table.buckets[bucket], hi = m->table.buckets[bucket + 1], part = (hi - lo) / m->grid.d;
    float *grads = m->dwhole[bucket], *mine = grads + m->grid.d_rank * part, *shard = m->state.grads + lo / m->grid.d;
    if (m->grid.d == 1 || part == 0) return;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->data_stream, m->bucket_done, 0));
    Span span(m, m->data_stream, "reduce-scatter");
    NCCL_CHECK(ncclReduceScatter(grads, add ? mine : shard, part, ncclFloat, ncclSum, m->data, m->data_stream));
    if (add) add_floats(shard, mine, part, m->data_stream);
    cudaEvent_t done = m->reduced_window[window_of(m, bucket, 2)];
    CUDA_CHECK(cudaEventRecord(done, m->data_stream));
    if (!m->opt.overlap) CUDA_CHECK(cudaStreamWaitEvent(m->stream, done, 0));
}

// Gathers the weights of buckets [first, behind) that are not in their windows. Compute is through with what was there.
static void gather_buckets(GPT *m, size_t first, size_t behind) {
    if (m->grid.d == 1 || !m->opt.zero) return;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->data_stream, m->bucket_done, 0));
    for (size_t b = first; b < behind; b++) {
        size_t lo = m->table.buckets[b], part = (m->table.buckets[b + 1] - lo) / m->grid.d;
        if (part == 0) continue;
        floatX *params = m->whole[b], *mine = m->state.params + lo / m->grid.d;
        size_t *holds = &m->holds[window_of(m, b, m->windows)];
        if (*holds == 1 + b) continue;
        *holds = 1 + b;
        Span span(m, m->data_stream, "all-gather");
        NCCL_CHECK(ncclAllGather(mine, params, part, NCCL_FLOATX, m->data, m->data_stream));
        CUDA_CHECK(cudaEventRecord(m->gathered_bucket[b], m->data_stream));
        if (!m->opt.overlap) CUDA_CHECK(cudaStreamWaitEvent(m->stream, m->gathered_bucket[b], 0));
    }
}

// Gathers the updated weights of all windows, in the order in which forward needs them.
static void gather_weights(GPT *m) {
    memset(m->holds, 0, bucket_count(m) * sizeof *m->holds);
    gather_buckets(m, 0, 2 + m->windows);
    gather_buckets(m, bucket_count(m) - 1, bucket_count(m));
}

// Whether a bucket of gradients is complete once this micro-batch's backward is through, and its sum may overlap.
static bool reduce_now(const GPT *m, int micro) { return m->opt.overlap && (size_t)micro + 1 == m->micros; }

// Waits on the device until a bucket's weights have been gathered: called before they are read.
static void use_bucket(GPT *m, size_t bucket) {
    if (m->grid.d > 1 && m->opt.zero) wait_for(m, m->gathered_bucket[bucket], "wait data");
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
    gather_buckets(m, 2, 2 + m->windows);  // backward leaves the first layers there, and validation the last
    for (size_t l = 0; l < L; l++) {
        use_bucket(m, 2 + l);
        layer_forward(m, l, &acts->layers[l], acts->residual[l + 1], acts->residual[l], B, T);
        if (l + m->windows < L) gather_buckets(m, 2 + l + m->windows, 3 + l + m->windows);
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
        use_bucket(m, 2 + l);
        wait_for(m, m->reduced_window[window_of(m, 2 + l, 2)], "wait data");
        layer_backward(m, l, &acts->layers[l], acts->residual[l], add && m->grid.d == 1);
        reduce_bucket(m, 2 + l, add);  // first: layer l - 2 waits for it, too, and it may begin at once
        if (l >= m->windows) gather_buckets(m, 2 + l - m->windows, 3 + l - m->windows);
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
    run_batch(m, true);
    // With overlap those of wte and wpe are left, which the encoder's gradient completes.
    reduce_bucket(m, 0);
    reduce_bucket(m, 1);
    if (!m->opt.overlap) reduce_bucket(m, bucket_count(m) - 1);
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

// Makes the communicator, with a stream of its own, as it overlaps compute.
static void connect(GPT *m) {
    m->data = job_split_grid(&m->job, &m->grid, 'd', "data");
    event_create(&m->bucket_done), event_create(&m->reduced_all);
    host_array(m->gathered_bucket, bucket_count(m));
    for (size_t b = 0; b < bucket_count(m); b++) event_create(&m->gathered_bucket[b]);
    host_array(m->reduced_window, bucket_count(m));
    for (size_t b = 0; b < bucket_count(m); b++) event_create(&m->reduced_window[b]);
    m->data_stream = stream_create(m, "data", true);
    trainer_warm_up(m);
}

// Refuses what only the parent does.
static bool check(Trainer *m, Error *err) {
    return m->opt.zero || error_set(err, "--zero 0 keeps the optimizer whole on every rank: use train_data for that");
}

int main(int argc, char **argv) {
    static GPT gpt, *m = &gpt;
    trainer_open(m, argc, argv, OPTIONS_DATA, {{SHARD_OPTIONS, 1, &m->own}, check, NULL, NULL});  // bad input ends here
    shard(m);
    trainer_allocate(m, layout);
    connect(m);
    trainer_start(m);
    gather_weights(m);

    for (;;) {  // validation, save and sample if they are due, then one more step
        while (validation_goes_on(m)) run_batch(m, false);
        if (save_due(m)) trainer_save(m);
        while (sample_goes_on(m)) sample_token(m);
        if (is_last_step(m)) break;
        train_step(m);
    }
    return trainer_close(m);
}
