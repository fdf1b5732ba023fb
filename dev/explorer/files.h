// files.h: stubs for the parts of a trainer that read or write files or the clock. The page has
// neither: the run is a --dry-run and one step more. Names and types are the same as in the
// headers that it replaces.
#ifndef EXPLORER_FILES_H
#define EXPLORER_FILES_H

#include "device.h"
#include "llmc/host/error.h"
#include "llmc/model.h"

#define LLMC_BETWEEN_STEPS_CUH
#define LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_LIST_H
#define LLMC_DATALOADER_H
#define LLMC_MASKS_H
#define LLMC_DROPOUT_CUH
#define LLMC_EVAL_FILE_H
#define LLMC_FILE_H
#define LLMC_LOG_H
#define LLMC_OUTPUTS_H
#define LLMC_RAMP_H
#define LLMC_RAND_H
#define RANDOM_FUNCTION static inline
#define LLMC_TIMELINE_CUH
#define LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_FILE_H
#define LLMC_TRACE_H
#define LLMC_TRAINER_JSON_H

// Kernels do nothing.
#include "llmc/kernels/cuda_common.cuh"
#undef LAUNCH
#undef LAUNCH_UNCHECKED
#define LAUNCH(kernel, grid, block, ...) kernel_launch(grid, block, __VA_ARGS__)

// The one file: the list of steps that a user has written.
extern "C" char schedule_text[];
static inline char *file_read(const char *, size_t, size_t *bytes, Error *) {
    *bytes = strlen(schedule_text);
    return schedule_text;
}

typedef enum { STATE_WEIGHTS, STATE_M, STATE_V, STATE_MASTER } StateKind;
typedef struct {
    size_t count;
    uint64_t *sums;
} Checksums;
typedef struct {
    int none;
} Kept;
DOES_NOTHING(bool, kept_read, true)
DOES_NOTHING(bool, checkpoint_claim, true)
DOES_NOTHING(bool, checkpoint_latest, true)
DOES_NOTHING(void, checkpoint_pass_over, )
DOES_NOTHING(bool, config_read, true)
DOES_NOTHING(bool, checkpoint_check, true)
DOES_NOTHING(bool, checkpoint_sum, true)
DOES_NOTHING(bool, checkpoint_matches, true)
DOES_NOTHING(bool, checkpoint_create, true)
DOES_NOTHING(bool, checkpoint_commit, true)
DOES_NOTHING(void, checkpoint_prune, )
#define GRADIENTS_START ""
#define GRADIENTS_UNFINISHED ""
enum { ST_F32 };
DOES_NOTHING(bool, slices_create, true)
DOES_NOTHING(bool, slices_read, true)
DOES_NOTHING(bool, slices_write, true)
typedef struct {
    const char *path;
    int files[1];
} SafeTensors;
DOES_NOTHING(bool, state_has, true)
DOES_NOTHING(bool, state_open, true)
DOES_NOTHING(bool, st_open, true)
DOES_NOTHING(void, st_close, )
DOES_NOTHING(int, fsync, 0)
DOES_NOTHING(int, rename, 0)
DOES_NOTHING(const char *, strerror, "")
DOES_NOTHING(void, progress_lesson, )
DOES_NOTHING(bool, progress_resume, true)
DOES_NOTHING(bool, progress_data, true)
#define LLMC_TUNED_CUH
DOES_NOTHING(bool, trainer_tuned, true)
DOES_NOTHING(bool, path_print, true)
DOES_NOTHING(bool, outputs_check, true)

typedef struct {
    size_t samples;
} DataLoader;
DOES_NOTHING(bool, dataloader_open, true)
DOES_NOTHING(bool, dataloader_read, true)

typedef struct {
    int none;
} Tokenizer;
DOES_NOTHING(bool, tokenizer_beside, true)
DOES_NOTHING(bool, tokenizer_open, true)
DOES_NOTHING(bool, tokenizer_prompt, true)
DOES_NOTHING(void, tokenizer_print, )
typedef enum {
    RANDOM_SAMPLE,
    DROPOUT_EMBEDDING,
    DROPOUT_SCORES,
    DROPOUT_PROJ,
    DROPOUT_FCPROJ
} RandomPurpose;
#include "llmc/host/tokens.h"
typedef struct {
    uint32_t threshold;
    uint64_t sample, head, T, row;
    Tokens tokens;
} Dropout;
DOES_NOTHING(Dropout, dropout_make, (Dropout()))
DOES_NOTHING(Dropout, dropout_for, (Dropout()))
DOES_NOTHING(void, by_dropout, )
DOES_NOTHING(void, dropout_forward, )
DOES_NOTHING(const floatX *, dropout_backward, NULL)
template <int W>
static inline void dropout_mask(float (&)[W], const Dropout &, size_t, size_t, size_t) {
}
DOES_NOTHING(double, random_uniform, 0)
DOES_NOTHING(void, random_normal_fill, )
DOES_NOTHING(int, sample_token, 0)

typedef struct {
    size_t rows;
} EvalFile;
DOES_NOTHING(bool, eval_open, true)
DOES_NOTHING(void, eval_sample, )

// Every batch is a full one.
typedef struct {
    size_t start, increment, samples;
} Ramp;
typedef int LRSchedule;
DOES_NOTHING(double, learning_rate, 0)
DOES_NOTHING(bool, ramp_parse, true)
static inline size_t ramp_batch(const Ramp *, size_t G, size_t) { return G; }

#include "llmc/host/options_table.h"
typedef struct {
    size_t step, first_step, sample, save;
    bool bf16;
    Options opt;
} TrainerState;

typedef struct {
    size_t step;
    double loss, grad_norm, lr, ms, tokens;
} StepReport;
typedef struct {
    FILE *json;
} Log;
// A run without signals and without work between its steps.
DOES_NOTHING(bool, validation_goes_on, false)
DOES_NOTHING(bool, save_due, false)
DOES_NOTHING(void, trainer_save, )
DOES_NOTHING(bool, sample_goes_on, false)
DOES_NOTHING(void, sample_append, )
DOES_NOTHING(bool, is_last_step, true)
DOES_NOTHING(int, trainer_close, 0)

DOES_NOTHING(bool, log_open, true)
DOES_NOTHING(bool, log_close, true)
DOES_NOTHING(void, log_step, )
DOES_NOTHING(void, log_validation, )
DOES_NOTHING(double, device_peak_flops, 0)

typedef struct {
    int none;
} TraceEvent;
typedef struct {
    TraceEvent *events;
    size_t count;
} TraceList;
typedef struct {
    bool on, paused;
    TraceList trace;
} Timeline;
DOES_NOTHING(double, seconds_now, 0)
DOES_NOTHING(void, timeline_start, )
DOES_NOTHING(void, timeline_collect, )
DOES_NOTHING(size_t, span_begin, 0)
DOES_NOTHING(void, span_end, )
DOES_NOTHING(bool, trace_write, true)

#endif
