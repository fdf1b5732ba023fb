// progress.h: where a run stands, from its options and, when it resumes, from a checkpoint's trainer.json.
//
// defines: progress_start, progress_resume, progress_data
#ifndef LLMC_PROGRESS_H
#define LLMC_PROGRESS_H

#include "llmc/host/checkpoint_list.h"
#include "llmc/host/dataloader.h"
#include "llmc/host/options.h"

// The state of a run that has done nothing yet.
static inline TrainerState progress_start(const Options *o, bool bf16) {
    TrainerState s;
    memset(&s, 0, sizeof s);
    s.seed = o->seed;
    s.shuffle = o->shuffle;
    s.bf16 = bf16;
    s.seq = o->seq;
    s.global_batch = o->global_batch;
    s.steps = o->steps;
    s.warmup = o->warmup;
    s.lr_schedule = o->lr_schedule;
    s.lr = o->lr;
    s.lr_final = o->lr_final;
    s.weight_decay = o->weight_decay;
    s.clip = o->clip;
    s.beta1 = o->beta1;
    s.beta2 = o->beta2;
    s.eps = o->eps;
    s.ramp_start = o->ramp.start;
    s.ramp_increment = o->ramp.increment;
    s.ramp_samples = o->ramp.samples;
    s.lr_unit = o->lr_unit;
    s.dropout = o->dropout;
    return s;
}

// Takes up step and data position of the checkpoint in dir. Refuses one that these options cannot continue, and says
// (to stdout) which options differ from those that it was trained with.
static inline bool progress_resume(TrainerState *progress, const char *dir, Error *err) {
    TrainerState saved;
    char changed[512];
    if (!checkpoint_read_state(dir, &saved, err)) return false;
    if (!trainer_state_compare(&saved, progress, changed, sizeof changed, err)) return false;
    progress->step = progress->first_step = saved.step;
    progress->sample = saved.sample;
    memcpy(progress->data, saved.data, sizeof saved.data);
    printf("resuming     %s after step %zu%s%s\n", dir, saved.step, changed[0] ? "; changed: " : "", changed);
    if (saved.step >= progress->steps)
        printf("note: the checkpoint has done all of --steps %zu: nothing is trained\n", progress->steps);
    return true;
}

// Takes up what data this run trains on. Refuses, unless `anyway`, other data than the checkpoint that it resumes was
// trained on; one from before checkpoints said it is taken as it is.
static inline bool progress_data(TrainerState *progress, const DataLoader *data, bool anyway, Error *err) {
    char now[TRAINER_DATA_SIZE];
    dataloader_describe(data, now, sizeof now);
    if (progress->data[0] && strcmp(progress->data, now) != 0 && !anyway) {
        return error_set(err, "the checkpoint was trained on other data (weight x samples: %s) than --train-data names "
                         "(%s): name the same, or start anew from its weights with --init (--verify 0 goes on with "
                         "these)", progress->data, now);
    }
    memcpy(progress->data, now, sizeof now);
    return true;
}

#endif
