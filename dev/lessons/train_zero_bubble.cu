// train_zero_bubble.cu: train_gpt_3d.cu with backwards in two halves.
// parent: train_gpt_3d.cu
//
// Zero Bubble (Qi et al. 2024) splits a backward in two. The input half makes the gradient
// for which the stage before waits. The weight half makes the gradients of the weights. No
// stage waits for them, so a schedule puts weight steps where a stage would be idle. The
// input half keeps all that the weight half reads.
//
// The d replicas share the global batch. A reduce-scatter sums each bucket of gradients
// (wte, wpe, each layer, ln_f) over them. ZeRO-1: each data rank then owns 1/d of every
// bucket, even where that cuts through a tensor, and updates it. The weights are gathered
// again while the next forward runs.
//
// The layers are dealt to p stages in v chunks each: global chunk c*p + s is chunk c of
// stage s. A stage runs the list of steps that llmc/pipeline.h gives it; activations go up
// and gradients down over links.
//
// Each layer is shared by t ranks. QKV and FC are split by columns, the two projections and
// the vocabulary by rows. Operators f and g stand where the paper draws them. Under sequence
// parallelism layernorms and residuals are cut by rows.
//
// Letters: B micro-batch (sequences), T sequence length, N = B*T tokens, C channels,
// L layers, NH heads, V vocabulary, Vp the same padded to 128. A shape stands behind every
// pointer. Weights are [in, out]: w[QKVW] is one of a layer, dw[QKVW] its gradient
// (llmc/model.h).
//
// Each of t tensor ranks has:
//   A = C/t channels, in NHl = NH/t heads.
//   F = 4C/t hidden units.
//   Vl = Vp/t tokens of the vocabulary, from V0 on.
//   Nl = N/sp rows of the residual stream. Under sequence parallelism sp = t, else 1.

// Trainer: everything but the mathematics: options, memory, data, optimizer, checkpoints
#include "llmc/trainer/stages.cuh"
#include "llmc/zero_bubble.h"
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

// The input half of a layer's backward pass keeps these for the weight half.
struct LayerGrads {
    floatX *dout;        // (Nl, C)  gradient of the layer's output
    floatX *dresidual2;  // (Nl, C)  and of residual2
    floatX *dfch;        // (N, F)
    floatX *dqkv;        // (N, 3A)
};

// A micro-batch keeps these from its forward to its backward pass.
struct Acts {
    LayerActs *layers;  // [L]
    LayerGrads *grads;  // [L]
    floatX **residual;  // [L + 1] of (Nl, C): the input of each layer, and that of ln_f
    Layernorm lnf;      // (Nl, C)
};

// One end of a link. A link carries activations up or gradients down between two stages. It
// has a stream of its own at both ends, so a message that waits holds up neither compute
// nor other messages. Two buffers let a message travel while compute is at the next.
struct LinkEnd {
    ncclComm_t comm;        // of two ranks, 0 sends to 1; NULL: no link, or not connected yet
    cudaStream_t stream;
    floatX *buffer[PIPELINE_BUFFERS];       // (N * C / t)  a tensor rank's part of a message
    cudaEvent_t filled[PIPELINE_BUFFERS];   // the buffer holds a message
    cudaEvent_t emptied[PIPELINE_BUFFERS];  // and can take the next one
    size_t count;           // messages so far; number k is in buffer k % PIPELINE_BUFFERS
};

struct GPT : Trainer {
    ncclComm_t tensor;            // the t ranks that share each layer
    cudaStream_t tensor_stream;   // for its collectives that overlap compute
    cudaEvent_t computed;         // the input of such a collective is written
    cudaEvent_t reduced_ready;    // dreduced is written

    ncclComm_t embedding;   // first and last stage, which both hold wte; else NULL
    LinkEnd receive[2];     // of activations and of gradients, by StepKind
    LinkEnd send[2];
    PipelinePlan plan;      // this stage's chunks of layers, and its steps with their slots

    ncclComm_t data;               // the d ranks that hold the same part of the model
    cudaStream_t data_stream;
    cudaEvent_t bucket_done;       // the next bucket to reduce or gather is written
    cudaEvent_t reduced_all;       // all buckets are reduced
    cudaEvent_t *gathered_bucket;  // [buckets] its weights are up to date on every data rank

    Acts *slots;        // [plan.slots] micro-batches in flight: the schedule says how many

    // The loss has the largest buffer, so its gradient takes the place of the logits.
    floatX *logits;     // (N, Vl)      become their own gradient
    float *row_max;     // (N)          the largest logit of a token
    float *row_max_local;  // (N)       and the largest of this rank
    float *row_sums;    // (2, N)       sum of the exponentials; logit of the target

    // One layer is at work at a time, so one set of these serves all.
    floatX *proj;       // (N, C)       output of a projection; gradient behind dropout
    floatX *dresidual;  // (Nl, C)      gradient of the residual stream
    floatX *dnorm;      // (N, C)       gradient of a layernorm's output; (N, A) of atty
    floatX *reduced;    // (Nl, C)      proj, summed over the ranks: in its place if Nl = N
    floatX *dreduced;   // (Nl, C)      and dnorm
    floatX *gathered;   // (N, C)       rows of all ranks: f's output
    floatX *dgathered;  // (N, C)       and g's output in backward
    float *dattention;  // (B, NHl, T)  scratch of attention's backward pass
    float *scratch;     // partial sums over rows, for gradients of biases and layernorms
};

// Makes this data rank the owner of 1/d of every bucket.
static void own_buckets(GPT *m, State *state) {
    for (size_t b = 0; b < bucket_count(m); b++) {
        size_t lo = m->table.buckets[b], hi = m->table.buckets[b + 1];
        size_t part = (hi - lo) / m->grid.d;
        state_own(state, lo + m->grid.d_rank * part, part);
    }
}

// Takes this rank's part of every layer of its stage, and of the vocabulary. It owns 1/d of
// the reduced gradients, and with ZeRO 1/d of the optimizer.
static void shard(GPT *m) {
    size_t t = m->grid.t;
    trainer_sizes(m, t);
    m->V0 = m->grid.t_rank * m->Vl;
    if (m->opt.sequence_parallel)
        m->sp = t;

    Error err;
    PipelineLists lists;
    const Options *o = &m->opt;
    PipelineTimes times = zero_bubble_times(m->config.C, m->T);
    bool ok = zero_bubble_lists(&lists, (Schedule)o->schedule, o->schedule_file, m->grid.p,
                                m->micros, o->chunks, &times, o->max_in_flight, &err);
    job_agree(&m->job, ok, &err);
    m->plan = pipeline_plan(&lists, m->config.L, o->layers_per_stage, m->grid.p_rank);

    Shard mine = shard_whole(&m->config);
    mine.t = t;
    mine.t_rank = m->grid.t_rank;
    mine.embedding = m->grid.p_rank == 0;
    mine.head = m->grid.p_rank == m->grid.p - 1;
    mine.n_layers = m->plan.layer_count;
    mine.layers = m->plan.layers;
    mine.bucket_align = TENSOR_ALIGN * m->grid.d;
    trainer_shard(m, mine);

    own_buckets(m, &m->share);
    if (m->opt.zero)
        own_buckets(m, &m->state);
}

// Takes memory for the activations of one micro-batch. Recomputed activations live only
// while one layer is at work, so all layers of all slots share the first one's buffers.
static void layout_acts(GPT *m, Arena *arena, Acts *acts) {
    size_t N = m->B * m->T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F;
    size_t L = m->plan.most_layers;
    host_array(acts->layers, L);
    host_array(acts->residual, L + 1);
    host_array(acts->grads, L);

    // The input of each layer is always kept: the layer can be computed again from it.
    for (size_t l = 0; l <= L; l++)
        take(arena, acts->residual[l], Nl * C);

    for (size_t l = 0; l < L; l++) {
        LayerGrads *g = &acts->grads[l];
        take(arena, g->dout, Nl * C);
        take(arena, g->dresidual2, Nl * C);
        take(arena, g->dfch, N * F);
        take(arena, g->dqkv, N * 3 * A);
    }

    for (size_t l = 0; l < L; l++) {
        LayerActs *a = &acts->layers[l];
        LayerActs *first = &m->slots[0].layers[0];
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
    if (m->table.shard.head)
        take_layernorm(arena, &acts->lnf, Nl, C);
}

// Takes memory for every buffer: called once to count bytes, and once to set pointers, so
// that --dry-run prints the bytes that training takes.
static void layout(GPT *m) {
    size_t N = m->B * m->T, Nl = N / m->sp;
    size_t C = m->config.C, F = m->F;
    Arena *arena = trainer_layout(m);

    // the loss
    if (m->table.shard.head)
        take(arena, m->logits, N * m->Vl);
    take(arena, m->row_max, N);
    take(arena, m->row_max_local, N);
    take(arena, m->row_sums, 2 * N);

    // one layer at a time
    take(arena, m->proj, N * C);
    take(arena, m->dresidual, Nl * C);
    take(arena, m->dnorm, N * C);
    take(arena, m->dattention, N * m->NHl);
    take(arena, m->scratch, reduce_scratch_floats(N, C, F));

    // The sum of all rows takes the place of the partial one. A rank's rows of it have a
    // buffer of their own.
    m->reduced = m->proj;
    m->dreduced = m->dnorm;
    if (m->sp > 1) {
        take(arena, m->reduced, Nl * C);
        take(arena, m->dreduced, Nl * C);
        take(arena, m->gathered, N * C);
        take(arena, m->dgathered, N * C);
    }

    // links
    size_t message = m->grid.p > 1 ? N * C / m->grid.t : 0;
    for (StepKind kind : {STEP_FORWARD, STEP_BACKWARD}) {
        for (int b = 0; b < PIPELINE_BUFFERS; b++) {
            take(arena, m->receive[kind].buffer[b], message);
            take(arena, m->send[kind].buffer[b], message);
        }
    }

    // all layers of all micro-batches in flight
    host_array(m->slots, m->plan.slots);
    for (size_t i = 0; i < m->plan.slots; i++)
        layout_acts(m, arena, &m->slots[i]);
}

// ----------------------------------------------------------------------------------------
// Operators f and g
//
// A product by columns needs all of its input and makes some columns of its output. One by
// rows needs these columns only, and makes a summand of all of its output. So the two fit
// together, and a pair of them has one operator before it and one behind it.

// Sums partial (N, C) over the tensor ranks into out (Nl, C): all rows of it, or under
// sequence parallelism each rank its own.
static void tensor_sum(GPT *m, floatX *out, const floatX *partial, size_t N, cudaStream_t s) {
    size_t count = N / m->sp * m->config.C;
    Span span(m, s, m->sp > 1 ? "reduce-scatter" : "all-reduce");
    if (m->sp > 1)
        NCCL_CHECK(ncclReduceScatter(partial, out, count, NCCL_FLOATX, ncclSum, m->tensor, s));
    else
        NCCL_CHECK(ncclAllReduce(partial, out, count, NCCL_FLOATX, ncclSum, m->tensor, s));
}

// Under sequence parallelism gathers the rows of all tensor ranks, x (Nl, C) -> out (N, C),
// and returns out. Else every rank has all rows: returns x.
static const floatX *tensor_gather(GPT *m, floatX *out, const floatX *x, size_t N,
                                   cudaStream_t s) {
    if (m->sp == 1) return x;
    Span span(m, s, "all-gather");
    NCCL_CHECK(ncclAllGather(x, out, N / m->sp * m->config.C, NCCL_FLOATX, m->tensor, s));
    return out;
}

// Operator f stands before a pair. In forward every rank takes the same input, and under
// sequence parallelism gathers it. So backward sums the gradients of all ranks.
static const floatX *f_forward(GPT *m, const floatX *x, size_t N) {
    return tensor_gather(m, m->gathered, x, N, m->stream);
}

// Starts the sum of dnorm. Nothing is left to hide it behind: the weight's gradients are in
// the other half.
static void f_backward_begin(GPT *m) {
    if (m->grid.t == 1) return;
    CUDA_CHECK(cudaEventRecord(m->computed, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(m->tensor_stream, m->computed, 0));
    tensor_sum(m, m->dreduced, m->dnorm, m->B * m->T, m->tensor_stream);
    CUDA_CHECK(cudaEventRecord(m->reduced_ready, m->tensor_stream));
}

// Waits for the sum, (Nl, C), and returns it.
static const floatX *f_backward_end(GPT *m) {
    if (m->grid.t > 1)
        wait_for(m, m->reduced_ready, "wait tensor");
    return m->dreduced;
}

// Operator g stands behind a pair, and is f turned round. Forward sums the summands of
// all ranks. In backward every rank takes the same gradient. Returns out.
static const floatX *g_forward(GPT *m, floatX *out, const floatX *partial, size_t N) {
    if (m->grid.t > 1)
        tensor_sum(m, out, partial, N, m->stream);
    return out;
}

// Returns all N rows of dout, so the gradients of the biases behind g need no sum over
// the ranks.
static const floatX *g_backward(GPT *m, const floatX *dout) {
    return tensor_gather(m, m->dgathered, dout, m->B * m->T, m->stream);
}

// Sums the gradients of layernorms in elements [lo, hi) over the tensor ranks. Under
// sequence parallelism each rank has the gradients from its own rows only.
static void reduce_layernorms(GPT *m, size_t lo, size_t hi) {
    if (m->sp == 1) return;
    NCCL_CHECK(ncclGroupStart());
    for (size_t i = 0; i < m->table.count; i++) {
        const Tensor *x = &m->table.tensors[i];
        bool norm = x->spec->flags & TENSOR_NORM;
        if (!norm || x->offset < lo || x->offset >= hi) continue;
        float *dx = m->state.grads + x->offset;
        NCCL_CHECK(ncclAllReduce(dx, dx, x->size, ncclFloat, ncclSum, m->tensor, m->stream));
    }
    NCCL_CHECK(ncclGroupEnd());
}

// ----------------------------------------------------------------------------------------
// Links between pipeline stages
//
// The host only enqueues: it waits for no message, so it need not know which comes first. A
// buffer is filled and emptied in turn, and each side waits for the event of the other. Each
// of t tensor ranks sends 1/t of a message to its counterpart. There all ranks gather it
// (the paper's scatter/gather optimisation). Under sequence parallelism 1/t is enough.

// Receives x (Nl, C) of N tokens from the neighbour: activations or gradients.
static void link_receive(GPT *m, StepKind kind, floatX *x, size_t N, int micro, int chunk) {
    LinkEnd *end = &m->receive[kind];
    if (!end->comm) return;
    size_t b = end->count++ % PIPELINE_BUFFERS, count = N * m->config.C / m->grid.t;

    CUDA_CHECK(cudaStreamWaitEvent(end->stream, end->emptied[b], 0));
    Span span(m, end->stream, "recv", micro, chunk);
    NCCL_CHECK(ncclRecv(end->buffer[b], count, NCCL_FLOATX, 0, end->comm, end->stream));
    CUDA_CHECK(cudaEventRecord(end->filled[b], end->stream));

    wait_for(m, end->filled[b], "wait pipeline");
    if (m->sp > 1 || m->grid.t == 1)
        trainer_copy(m, x, end->buffer[b], count);
    else
        NCCL_CHECK(ncclAllGather(end->buffer[b], x, count, NCCL_FLOATX, m->tensor, m->stream));
    CUDA_CHECK(cudaEventRecord(end->emptied[b], m->stream));
}

// Sends x to the neighbour; later work may overwrite x.
static void link_send(GPT *m, StepKind kind, const floatX *x, size_t N, int micro, int chunk) {
    LinkEnd *end = &m->send[kind];
    if (!end->comm) return;
    size_t b = end->count++ % PIPELINE_BUFFERS, count = N * m->config.C / m->grid.t;
    const floatX *mine = m->sp > 1 ? x : x + m->grid.t_rank * count;

    wait_for(m, end->emptied[b], "wait pipeline");
    trainer_copy(m, end->buffer[b], mine, count);
    CUDA_CHECK(cudaEventRecord(end->filled[b], m->stream));

    CUDA_CHECK(cudaStreamWaitEvent(end->stream, end->filled[b], 0));
    Span span(m, end->stream, "send", micro, chunk);
    NCCL_CHECK(ncclSend(end->buffer[b], count, NCCL_FLOATX, 1, end->comm, end->stream));
    CUDA_CHECK(cudaEventRecord(end->emptied[b], end->stream));
}

// Returns true for the chunk that starts from tokens.
static bool is_first(const GPT *m, size_t chunk) {
    return m->table.shard.embedding && chunk == 0;
}

// Returns true for the chunk that ends in the loss.
static bool is_last(const GPT *m, size_t chunk) {
    return m->table.shard.head && chunk == m->plan.chunks - 1;
}

// ----------------------------------------------------------------------------------------
// Buckets: gradients are summed and weights are gathered over the data ranks

// Sums a bucket of gradients over the data ranks, on a stream of its own, so that it
// overlaps backward. Each rank gets its part of the sum, and without ZeRO all parts.
static void reduce_bucket(GPT *m, size_t bucket) {
    size_t lo = m->table.buckets[bucket], hi = m->table.buckets[bucket + 1];
    size_t part = (hi - lo) / m->grid.d;
    float *grads = m->state.grads + lo, *mine = grads + m->grid.d_rank * part;
    reduce_layernorms(m, lo, hi);
    if (m->grid.d == 1 || part == 0) return;

    cudaStream_t s = m->data_stream;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(s, m->bucket_done, 0));
    Span span(m, s, "reduce-scatter");
    NCCL_CHECK(ncclReduceScatter(grads, mine, part, ncclFloat, ncclSum, m->data, s));
    if (!m->opt.zero)
        NCCL_CHECK(ncclAllGather(mine, grads, part, ncclFloat, m->data, s));
}

// Gathers the updated weights of all buckets, in the order in which forward needs them.
static void gather_weights(GPT *m) {
    if (m->grid.d == 1 || !m->opt.zero) return;
    cudaStream_t s = m->data_stream;
    CUDA_CHECK(cudaEventRecord(m->bucket_done, m->stream));
    CUDA_CHECK(cudaStreamWaitEvent(s, m->bucket_done, 0));
    for (size_t b = 0; b < bucket_count(m); b++) {
        size_t lo = m->table.buckets[b], hi = m->table.buckets[b + 1];
        size_t part = (hi - lo) / m->grid.d;
        if (part == 0) continue;
        floatX *params = m->state.params + lo, *mine = params + m->grid.d_rank * part;
        Span span(m, s, "all-gather");
        NCCL_CHECK(ncclAllGather(mine, params, part, NCCL_FLOATX, m->data, s));
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
    const floatX *ln1 = f_forward(m, a->ln1.out, N);
    matmul_forward(mm, a->qkv, ln1, w[QKVW], w[QKVB], N, C, 3 * A);
    attention_forward(a->atty, a->lse, a->qkv, B, T, A, m->NHl, s,
                      drop(m, DROPOUT_SCORES, l));
    matmul_forward(mm, m->proj, a->atty, w[PROJW], NULL, N, A, C);
    const floatX *proj = g_forward(m, m->reduced, m->proj, N);

    // Its bias, the sum and the next layernorm are one kernel: the row is read once.
    layernorm_residual_forward(a->residual2, a->ln2, x, proj, w[PROJB],
                               w[LN2W], w[LN2B], Nl, C, s, drop(m, DROPOUT_PROJ, l));

    // the MLP: four times as many hidden units as channels (F = 4C on a rank alone)
    const floatX *ln2 = f_forward(m, a->ln2.out, N);
    matmul_forward(mm, a->fch, ln2, w[FCW], w[FCB], N, C, F);
    gelu_forward(a->fch_gelu, a->fch, N * F, s);
    if (!out) return;  // Backward computes a layer again up to here: it reads no more.

    matmul_forward(mm, m->proj, a->fch_gelu, w[FCPROJW], NULL, N, F, C);
    proj = g_forward(m, m->reduced, m->proj, N);
    residual_forward(out, a->residual2, proj, w[FCPROJB], Nl, C, s,
                     drop(m, DROPOUT_FCPROJ, l));
}

// Runs the input half of one layer's backward. dresidual (Nl, C), the gradient of its output,
// becomes the gradient of its input x. Gradients of layernorms and of FCB come on the way:
// the first micro-batch writes them, the others add to them (add).
static void layer_backward(GPT *m, size_t l, LayerActs *a, LayerGrads *g, const floatX *x,
                           bool add) {
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

    // the MLP
    trainer_copy(m, g->dout, dresidual, Nl * C);
    const floatX *dout = dropout_backward(m->proj, dresidual,
                                          drop(m, DROPOUT_FCPROJ, l), Nl, C, s);
    dout = g_backward(m, dout);
    matmul_backward_input(mm, g->dfch, dout, w[FCPROJW], N, F, C);
    gelu_backward(g->dfch, dw[FCB], scratch, g->dfch, a->fch, N, F, add, s);
    matmul_backward_input(mm, m->dnorm, g->dfch, w[FCW], N, C, F);
    f_backward_begin(m);
    const floatX *dln2 = f_backward_end(m);

    // residual2 has gone past the MLP as well as through it: both gradients add up.
    layernorm_backward(dresidual, dw[LN2W], dw[LN2B], scratch, dresidual, dln2,
                       a->residual2, w[LN2W], a->ln2, Nl, C, add, s);

    // attention: its backward pass computes the scores again, which are too many to keep
    trainer_copy(m, g->dresidual2, dresidual, Nl * C);
    dout = dropout_backward(m->proj, dresidual, drop(m, DROPOUT_PROJ, l), Nl, C, s);
    dout = g_backward(m, dout);
    matmul_backward_input(mm, m->dnorm, dout, w[PROJW], N, A, C);
    attention_backward(g->dqkv, m->dattention, m->dnorm, a->atty, a->lse, a->qkv,
                       B, T, A, m->NHl, s, drop(m, DROPOUT_SCORES, l));
    matmul_backward_input(mm, m->dnorm, g->dqkv, w[QKVW], N, C, 3 * A);
    f_backward_begin(m);
    const floatX *dln1 = f_backward_end(m);

    // x has gone past attention, too. dresidual is now the gradient of the layer before.
    layernorm_backward(dresidual, dw[LN1W], dw[LN1B], scratch, dresidual, dln1,
                       x, w[LN1W], a->ln1, Nl, C, add, s);
}

// Runs the weight half of one layer's backward: the products for which no other gradient
// waits.
static void layer_backward_weight(GPT *m, size_t l, LayerActs *a, LayerGrads *g,
                                  const floatX *x, bool add) {
    size_t B = m->B, T = m->T;
    size_t N = B * T, Nl = N / m->sp;
    size_t C = m->config.C, A = m->A, F = m->F;
    float **dw = m->dw[l];
    float *scratch = m->scratch;
    Matmul *mm = &m->matmul;
    cudaStream_t s = m->stream;

    // Other micro-batches may have used the buffers since the input half.
    if (m->opt.recompute == RECOMPUTE_LAYER)
        layer_forward(m, l, a, NULL, x, B, T);
    if (m->opt.recompute == RECOMPUTE_GELU)
        gelu_forward(a->fch_gelu, a->fch, N * F, s);

    // the MLP
    const floatX *dout = dropout_backward(m->proj, g->dout,
                                          drop(m, DROPOUT_FCPROJ, l), Nl, C, s);
    dout = g_backward(m, dout);
    const floatX *ln2 = f_forward(m, a->ln2.out, N);
    matmul_backward_weight(mm, dw[FCPROJW], a->fch_gelu, dout, N, F, C, add);
    bias_backward(dw[FCPROJB], dout, scratch, N, C, add, s);
    matmul_backward_weight(mm, dw[FCW], ln2, g->dfch, N, C, F, add);

    // attention
    dout = dropout_backward(m->proj, g->dresidual2, drop(m, DROPOUT_PROJ, l), Nl, C, s);
    dout = g_backward(m, dout);
    const floatX *ln1 = f_forward(m, a->ln1.out, N);
    matmul_backward_weight(mm, dw[PROJW], a->atty, dout, N, A, C, add);
    bias_backward(dw[PROJB], dout, scratch, N, C, add, s);
    matmul_backward_weight(mm, dw[QKVW], ln1, g->dqkv, N, C, 3 * A, add);
    bias_backward(dw[QKVB], g->dqkv, scratch, N, 3 * A, add, s);
}

// Runs one chunk: tokens (B, T), or residual[0] from the chunk before -> lnf (Nl, C), or
// residual[L] for the next one. The residual stream begins with a token's row of wte and
// its position's row of wpe. A rank looks up the tokens of its part of the vocabulary, and
// rank 0 adds the positions.
static void forward(GPT *m, Acts *acts, const int *inputs, size_t B, size_t T, int micro,
                    int chunk) {
    size_t N = B * T, Nl = N / m->sp;
    size_t C = m->config.C, L = m->plan.count[chunk], first = m->plan.first[chunk];
    floatX **w = m->w[0];
    floatX *x = acts->residual[0];
    cudaStream_t s = m->stream;
    Span span(m, s, "forward", micro, chunk);

    // This is the only place where a token's position counts.
    if (is_first(m, chunk)) {
        use_bucket(m, 0);
        use_bucket(m, 1);
        floatX *partial = m->sp > 1 ? m->proj : x;
        const floatX *wpe = m->grid.t_rank == 0 ? w[WPE] : NULL;
        encoder_forward(partial, inputs, w[WTE], wpe, B, T, C, m->V0, m->Vl, s);
        g_forward(m, x, partial, N);
        dropout_forward(x, drop(m, DROPOUT_EMBEDDING, 0), Nl, C, s);
    }

    for (size_t l = 0; l < L; l++) {
        use_bucket(m, BUCKET_LAYERS + first + l);
        layer_forward(m, first + l, &acts->layers[l], acts->residual[l + 1],
                      acts->residual[l], B, T);
    }

    if (!is_last(m, chunk)) return;
    use_bucket(m, 0);  // the head is wte
    use_bucket(m, bucket_count(m) - 1);
    layernorm_forward(acts->lnf, acts->residual[L], w[LNFW], w[LNFB], Nl, C, s);
}

// Computes the micro-batch's losses from lnf (Nl, C). To train, the logits become their own
// gradient, softmax minus target. The gradient of the last layer's output goes to dresidual
// (Nl, C). Both are gradients of the step's mean loss. Every rank has the logits of its
// part of the vocabulary. Only three numbers a token travel: maximum, sum of exponentials,
// logit of the target.
static void loss_and_gradient(GPT *m, Acts *acts, const int *targets, int micro,
                              bool training) {
    size_t N = m->B * m->T, Nl = N / m->sp;
    size_t C = m->config.C, L = m->plan.count[m->plan.chunks - 1];
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
    const floatX *lnf = f_forward(m, acts->lnf.out, N);
    linear_forward(mm, m->logits, lnf, w[WTE], NULL, N, C, Vl);
    float *local = m->row_max_local;
    classifier_stats(local, sum, target, m->logits, targets, N, V, Vl, V0, s);
    NCCL_CHECK(ncclAllReduce(local, m->row_max, N, ncclFloat, ncclMax, m->tensor, s));
    classifier_rescale(sum, local, m->row_max, N, s);
    NCCL_CHECK(ncclAllReduce(sum, sum, 2 * N, ncclFloat, ncclSum, m->tensor, s));
    classifier_gradient(losses, m->logits, m->row_max, sum, target, targets,
                        m->dloss, N, V, Vl, V0, training, s);

    // Losses are summed in double and in a fixed order, so that the sum is reproducible.
    loss_sum(&m->loss_sums[micro], losses, N, s);
    if (!training) return;

    // Backward begins: through the head, and through the last layernorm.
    linear_backward_input(mm, m->dnorm, m->logits, w[WTE], N, C, Vl);
    f_backward_begin(m);
    linear_backward_weight(mm, dw[WTE], lnf, m->logits, N, C, Vl, add);
    const floatX *dlnf = f_backward_end(m);
    layernorm_backward(m->dresidual, dw[LNFW], dw[LNFB], m->scratch, NULL, dlnf,
                       acts->residual[L], w[LNFW], acts->lnf, Nl, C, add, s);
    if (reduce_now(m, micro))
        reduce_bucket(m, bucket_count(m) - 1);
}

// Runs the input half of one chunk's backward. Takes dresidual (Nl, C) as
// loss_and_gradient or the next chunk has left it, and makes it the gradient of the
// chunk's input. The first chunk then computes the gradients of the embeddings. The
// matrix wte has two uses: the lookup's gradient adds to the head's.
static void backward(GPT *m, Acts *acts, const int *inputs, int micro, int chunk) {
    size_t B = m->B, T = m->T, Nl = B * T / m->sp;
    size_t C = m->config.C, L = m->plan.count[chunk], first = m->plan.first[chunk];
    float **dw = m->dw[0];
    bool add = micro > 0;
    cudaStream_t s = m->stream;
    Span span(m, s, "backward", micro, chunk);

    for (size_t l = L; l-- > 0;)
        layer_backward(m, first + l, &acts->layers[l], &acts->grads[l], acts->residual[l], add);

    if (!is_first(m, chunk)) return;
    const floatX *dout = dropout_backward(m->dresidual, m->dresidual,
                                          drop(m, DROPOUT_EMBEDDING, 0), Nl, C, s);
    dout = g_backward(m, dout);
    encoder_backward(dw[WTE], dw[WPE], dout, inputs, B, T, C, m->config.maxT, m->V0, m->Vl,
                     add, s);
}

// Runs the weight half of one chunk's backward.
static void backward_weight(GPT *m, Acts *acts, int micro, int chunk) {
    size_t L = m->plan.count[chunk], first = m->plan.first[chunk];
    bool add = micro > 0;
    Span span(m, m->stream, "weight", micro, chunk);

    for (size_t l = L; l-- > 0;) {
        layer_backward_weight(m, first + l, &acts->layers[l], &acts->grads[l],
                              acts->residual[l], add);
        if (reduce_now(m, micro))
            reduce_bucket(m, BUCKET_LAYERS + first + l);
    }
}

// Run a forward or a backward with its messages: from one neighbour, and to the next one.
static void forward_step(GPT *m, Acts *acts, const int *inputs, size_t B, size_t T, int micro,
                         int chunk) {
    if (!is_first(m, chunk))
        link_receive(m, STEP_FORWARD, acts->residual[0], B * T, micro, chunk);
    forward(m, acts, inputs, B, T, micro, chunk);
    floatX *out = acts->residual[m->plan.count[chunk]];
    if (!is_last(m, chunk))
        link_send(m, STEP_FORWARD, out, B * T, micro, chunk);
}

static void backward_step(GPT *m, Acts *acts, const int *inputs, int micro, int chunk) {
    size_t N = m->B * m->T;
    if (!is_last(m, chunk))
        link_receive(m, STEP_BACKWARD, m->dresidual, N, micro, chunk);
    backward(m, acts, inputs, micro, chunk);
    if (!is_first(m, chunk))
        link_send(m, STEP_BACKWARD, m->dresidual, N, micro, chunk);
}

// Runs this stage's list of steps: all of it to train, only the forwards to validate. The
// logits are made when their gradient is due: one buffer serves all micro-batches in flight.
static void run_batch(GPT *m, bool training) {
    // A list may leave the halves together: then the weight half comes in the same step.
    StepKind weights_at = pipeline_last_use(m->plan.steps, m->plan.step_count);
    PipelineStep step;
    for (size_t i = 0; plan_step(&m->plan, m->micros, &i, &step); i++) {
        size_t micro = step.micro, at = micro * m->B * m->T;
        Acts *acts = &m->slots[training ? m->plan.slot[i] : 0];
        dropout_at(m, micro);
        if (step.kind == STEP_FORWARD)
            forward_step(m, acts, m->inputs + at, m->B, m->T, micro, step.chunk);

        StepKind with_loss = training ? STEP_BACKWARD : STEP_FORWARD;
        if (step.kind == with_loss && is_last(m, step.chunk))
            loss_and_gradient(m, acts, m->targets + at, micro, training);
        if (step.kind == STEP_BACKWARD && training)
            backward_step(m, acts, m->inputs + at, micro, step.chunk);
        if (step.kind == weights_at && training)
            backward_weight(m, acts, micro, step.chunk);
    }
}

// ----------------------------------------------------------------------------------------
// The run

// Runs one step over the next global batch: forward, backward and update. The norm of all
// gradients together decides if AdamW clips them.
static void train_step(GPT *m) {
    StepReport report = trainer_begin_step(m);

    // The first stage looks tokens up in wte, the last one makes the logits with it. The
    // head's gradient is written and the encoder's is added, so one of them needs zeros.
    if (m->embedding)
        zero_gradient(m, WTE);
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

    // The two stages add what their data ranks have summed. These sums may have been added in
    // another order on each stage, but a + b has the same bits on both: the copies stay equal.
    sum_gradient(m, WTE, m->embedding);
    trainer_norm(m, &report);
    trainer_adamw(m, &report);
    gather_weights(m);
    trainer_end_step(m, &report);
}

// Appends one token to the sample. Attention looks back only, so the last of its T tokens
// has the logits of the next one, and tokens behind it (padding) do no harm.
static void sample_token(GPT *m) {
    size_t C = m->config.C, last = m->sample.T - 1;
    for (size_t c = 0; c < m->plan.chunks; c++)
        forward_step(m, m->slots, m->inputs, 1, m->sample.padded, NO_MICRO, c);

    if (m->table.shard.head) {
        const floatX *lnf = f_forward(m, m->slots[0].lnf.out, m->sample.padded);
        linear_forward(&m->matmul, m->logits, lnf + last * C, m->w[0][WTE], NULL, 1, C,
                       m->Vl);
    }
    sample_append(m, m->logits, m->tensor);
}

// Makes one end of a link, without its communicator.
static void link_end_create(GPT *m, LinkEnd *end, const char *track) {
    end->stream = stream_create(m, track, true);
    for (int b = 0; b < PIPELINE_BUFFERS; b++) {
        event_create(&end->filled[b]);
        event_create(&end->emptied[b]);
    }
}

// Makes the links, all ranks in the same order. Until then no message travels.
static void connect_links(GPT *m) {
    int p = (int)m->grid.p, stage = (int)m->grid.p_rank;
    link_end_create(m, &m->receive[STEP_FORWARD], "receive activations");
    link_end_create(m, &m->send[STEP_FORWARD], "send activations");
    link_end_create(m, &m->receive[STEP_BACKWARD], "receive gradients");
    link_end_create(m, &m->send[STEP_BACKWARD], "send gradients");

    for (int link = 0; link < pipeline_link_count(p); link++) {
        int from, to;
        if (!pipeline_link_ends(p, (int)m->plan.chunks, link, &from, &to)) continue;
        ncclComm_t comm = trainer_link(m, from, to);
        if (stage == from)
            m->send[link / p].comm = comm;
        if (stage == to)
            m->receive[link / p].comm = comm;
    }
}

// Makes the communicators, and a stream for the collectives that overlap
// compute.
static void connect(GPT *m) {
    m->tensor = job_split_grid(&m->job, &m->grid, 't', "tensor", true);
    m->tensor_stream = stream_create(m, "all-reduce", true);
    event_create(&m->computed);
    event_create(&m->reduced_ready);
    if (m->grid.p > 1)
        m->embedding = job_split_grid(&m->job, &m->grid, 'e', "embedding");

    m->data = job_split_grid(&m->job, &m->grid, 'd', "data");
    m->data_stream = stream_create(m, "data", true);
    event_create(&m->bucket_done);
    event_create(&m->reduced_all);
    host_array(m->gathered_bucket, bucket_count(m));
    for (size_t b = 0; b < bucket_count(m); b++)
        event_create(&m->gathered_bucket[b]);

    trainer_warm_up(m, run_batch);
    connect_links(m);
}

int main(int argc, char **argv) {
    static GPT gpt, *m = &gpt;
    unsigned options = OPTIONS_TENSOR | OPTIONS_PIPELINE | OPTIONS_DATA;
    trainer_open(m, argc, argv, options);  // Bad input ends here.
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
