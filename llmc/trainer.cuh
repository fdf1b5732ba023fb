// trainer.cuh: everything but the mathematics, the same for all trainers: options, memory,
// data, gradient norm, AdamW, checkpoints, samples, log, timeline. A library: a trainer
// calls it, and it calls no trainer.
//
// A trainer's GPT is a Trainer with the model's own buffers behind it. It calls, in this
// order (see any main):
//   trainer_open       reads options, a checkpoint's configuration and data; refuses bad
//                      input with exit code 2
//   trainer_shard      takes this rank's part of the model
//   trainer_allocate   counts the trainer's layout, refuses what does not fit, ends a
//                      --dry-run, allocates
//   trainer_warm_up    uses communicators and kernels once, where there are several ranks
//                      (ranks.cuh)
//   trainer_start      reads weights from a checkpoint or makes random ones; the log begins
//   the training loop: validation_goes_on, save_due, sample_goes_on, then a step:
//     trainer_begin_step   loads the batch; trainer_norm, trainer_adamw, trainer_end_step
//   trainer_close      writes reports; returns the exit code
// It serves any grid of t x d x p ranks; one rank is a grid of 1 x 1 x 1.
//
// defines: Trainer, Lesson, take_layernorm, Span, stream_create, dropout_at, drop,
//          trainer_*; and all of the headers below
#ifndef LLMC_TRAINER_CUH
#define LLMC_TRAINER_CUH

#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_profiler_api.h>
#include <cuda_runtime.h>

#include "llmc/host/checkpoint_list.h"
#include "llmc/host/dataloader.h"
#include "llmc/host/eval_file.h"
#include "llmc/host/log.h"
#include "llmc/host/options.h"
#include "llmc/host/options_ranks.h"
#include "llmc/host/outputs.h"
#include "llmc/host/tokenizer_file.h"
#include "llmc/host/trainer_json.h"
#include "llmc/kernels/dropout.cuh"
#include "llmc/kernels/global_norm.cuh"
#include "llmc/kernels/layernorm.cuh"
#include "llmc/kernels/matmul.cuh"
#include "llmc/model.h"
#include "llmc/trainer/arena.cuh"
#include "llmc/trainer/job.cuh"
#include "llmc/trainer/state.cuh"
#include "llmc/trainer/timeline.cuh"

enum { NO_MICRO = -1 };  // the micro-batch of a span that belongs to none

// Three more sums travel with the squared norms: the loss, and the numbers of ranks that
// could not read their data or got a signal.
enum { TOTALS_EXTRA = 3 };

enum { MAX_STREAMS = 16 };

typedef struct {
    size_t batch,
        batches;   // batches run or running, of how many; 0: there is no validation now
    double sum;    // of their mean losses
    double *rows;  // of --eval: [rows][2]: loss, wrong (0/1); 0 for the rows of other ranks
} Validation;

// A text that grows by one token for each forward pass over its last T tokens.
typedef struct {
    bool running;
    int *tokens;           // of --prompt, then of the continuation
    size_t prompt, count;  // tokens of the prompt, and all so far
    size_t T, padded;  // tokens of the next pass, and the same rounded up: in the trainer's
                       // inputs, then zeros
} Sample;

struct Trainer {
    Options opt;
    GPTConfig config;
    Job job;              // the ranks, and how they end together
    Grid grid;            // t, d, p, and this rank's place in it
    int last_stage;       // its first rank, which has the logits of samples
    size_t B, T, micros;  // sequences of a micro-batch, their tokens on this rank,
                          // micro-batches of the batch
    // The T tokens of a sequence on this rank: all, unless a lesson cuts it.
    Tokens tokens;
    size_t readers, reader;  // groups of ranks that read different samples, and this rank's
    size_t batch;  // sequences of the current batch, on all data ranks: on a ramp
                   // fewer than --global-batch
    size_t A, NHl, F, Vl, V0;  // this rank's channels of heads, heads, hidden units,
                               // vocabulary and its first token
    size_t sp;    // ranks that share the rows of the residual stream: 1, or t (sequence
                  // parallelism)
    float dloss;  // gradient of the batch's loss by a token's: 1 / (tokens of the batch)
    ParamTable table;         // the tensors that this rank holds
    floatX *(*w)[MAX_KINDS];  // [layers held] weights: w[l][QKVW] of layer l; w[0][WTE] and
                              // so on outside them
    float *(*dw)[MAX_KINDS];  // [layers held] their gradients
    State state;  // weights, gradients, and the part of the optimizer that this rank owns
    State share;  // this rank's part of each gradient bucket after the data ranks have
                  // reduced it
    int *inputs, *targets;  // (micros, B * T) the batch, on the device
    Dropout
        dropout;    // of the current micro-batch; off (threshold 0) outside of training steps
    float *losses;  // (micros, 2, N) each target's loss, and how far its logit is from
                    // the largest
    double *loss_sums;    // [micros] sums of the losses; both are written by the last
                          // pipeline stage
    cudaStream_t stream;  // of all compute
    cudaStream_t streams[MAX_STREAMS];  // [stream_count] all of this rank
    size_t stream_count;
    const char *tracks[MAX_STREAMS];  // [stream_count] their names in the timeline
    Matmul matmul;
    Timeline timeline;
    Arena weights, gradients, optimizer, activations;  // the device's allocations

    double *norms,
        *norm_scratch;      // [share.piece_count] squared norm of each piece of a gradient
    unsigned adamw_blocks;  // of all of the state's pieces
    double *totals, *host_totals;  // [tensors of the whole model + TOTALS_EXTRA] sums
                                   // over all ranks: the norms, and three more
    int *host_inputs, *host_targets;  // (micros, B * T) pinned
    // Takes sequence i of a batch before it is cut; or NULL.
    void (*see_sequence)(Trainer *m, size_t i, const int *tokens);
    double *host_sums, *host_norms;   // [micros], [share.piece_count] pinned
    DataLoader train_data, val_data;
    EvalFile eval;  // of --eval
    Tokenizer tokenizer;
    TrainerState progress;  // steps done, next sample
    double step_began;      // seconds
    int out_lock;  // of --out, see folder_lock; 0: not taken yet, -1: there are no locks
    Kept kept;     // rank 0 of a run with --out: what its checkpoints take along
    size_t saved_step;  // of the last checkpoint of this run; 0: none
    bool data_failed;   // this rank could not read its data, and data_error says why
    Error data_error;
    Validation validation;
    Sample sample;
    floatX *sample_logits;  // (Vp) the next token's, gathered; none on ranks with whole
                            // layers and one stage
    void (*check_replicas)(Trainer *m);  // of --debug-replicas, or NULL
    bool stopped;  // a rank got a signal, and all know it: the run ends between two steps
    Log log;
    struct cudaDeviceProp device;
};

// The additions of a lesson behind the four trainers.
//   options    rows of the command line, which go before rows of the same name.
//   check      checks them, after all other options and before any data are opened.
//   spec       the model whose blocks it has; NULL: GPT-2.
//   sizes      takes sizes from its rows, before the sizes that were left out are filled in.
//   tokenizer  its reader of tokenizer.json; NULL: GPT-2's.
struct Lesson {
    FieldTable options;
    bool (*check)(Trainer *m, Error *err);
    const ModelSpec *spec;
    bool (*sizes)(Options *o, const void *flags, Error *err);  // flags: options.object
    bool (*tokenizer)(Tokenizer *tk, const Options *o, Error *err) = NULL;
    RankOptions groups = {};
};

// Takes memory for a layernorm of N rows of C channels.
static inline void take_layernorm(Arena *arena, Layernorm *ln, size_t N, size_t C) {
    take(arena, ln->out, N * C);
    take(arena, ln->mean, N);
    take(arena, ln->rstd, N);
}

// A span of the timeline: work that is queued on a stream while it is in scope. micro -1:
// of no micro-batch.
struct Span {
    Timeline *timeline;
    cudaStream_t stream;
    size_t number;
    Span(Trainer *m, cudaStream_t s, const char *kind, int micro = NO_MICRO, int chunk = 0)
        : timeline(&m->timeline), stream(s) {
        int track = 0;
        while (m->streams[track] != s) track++;
        number = span_begin(timeline, s, track, kind, micro, chunk);
    }
    ~Span() { span_end(timeline, stream, number); }
};

// Makes a stream, which is a track of that name in the timeline. All ranks make the same
// ones in the same order. A stream that communicates goes first where both could start:
// NCCL's kernels need room on a GPU that compute fills.
static inline cudaStream_t stream_create(Trainer *m, const char *track, bool communicates) {
    cudaStream_t stream;
    int least, greatest;
    if (m->stream_count == MAX_STREAMS) abort();
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                            communicates ? greatest : least));
    m->tracks[m->stream_count] = track;
    return m->streams[m->stream_count++] = stream;
}

// Sets dropout as the next step has it, or none. It is on between trainer_begin_step and
// trainer_end_step, and in half of the warm-up. Under sequence parallelism a rank's rows
// start at its part.
static inline void trainer_set_dropout(Trainer *m, bool on) {
    m->dropout = dropout_make(on ? m->opt.dropout : 0.0, m->opt.seed, m->progress.step, 0);
    m->dropout.head = m->grid.t_rank * (m->config.NH / m->grid.t);
    m->dropout.T = m->T;
    m->dropout.tokens = m->tokens;
    m->dropout.row = m->opt.sequence_parallel ? m->grid.t_rank * (m->B * m->T / m->grid.t)
                                              : 0;
}

// Takes the masks of this micro-batch from here on, forward and backward.
static inline void dropout_at(Trainer *m, size_t micro) {
    m->dropout.sample = (m->reader * m->micros + micro) * m->B;
}

// Returns the masks of one place in the l-th layer that this rank holds.
static inline Dropout drop(const Trainer *m, RandomPurpose place, size_t l) {
    return dropout_for(m->dropout, place, m->table.shard.layers[l]);
}

// Returns the place of a micro-batch's losses: (2, N), see Trainer.losses.
static inline float *trainer_losses(const Trainer *m, size_t micro) {
    return m->losses + micro * 2 * m->B * m->T;
}

// The seam of --virtual-time and --simulate. The stand-ins carry them out; a GPU build
// refuses both flags, and its clock is real.
#ifdef CPU_CLOCK
#include "llmc/cpu/virtual_run.cuh"
#else
static inline bool trainer_virtual_time(const Options *o, Error *err) {
    return (!o->virtual_time && !o->simulate && !o->ranks) ||
           error_set(err,
                     "--%s needs the trainers that need no GPU: build with make DEVICE=cpu",
                     o->simulate ? "simulate"
                     : o->ranks  ? "ranks"
                                 : "virtual-time");
}
static inline void trainer_simulate(int, char **, const Lesson *) {
}
static inline void trainer_clock_zero(Trainer *) {
}
static inline void trainer_clock_begin_step(void) {
}
static inline void trainer_clock_end_step(Trainer *, double) {
}
static inline void trainer_report_clock(Trainer *) {
}
#endif

static inline void trainer_leave(Trainer *m);
static inline bool has_moved(const Trainer *m) {
    return m->progress.step > m->progress.first_step;
}

#include "llmc/trainer/start.cuh"
#include "llmc/trainer/step.cuh"
#include "llmc/trainer/between_steps.cuh"

#endif
