// choices.h: names for values that the command line and the rest of the trainers share.
//
// defines: RECOMPUTE_*, LR_SCHEDULES, Schedule, ATTENTION_MAX_HEAD_SIZE
#ifndef LLMC_CHOICES_H
#define LLMC_CHOICES_H

// --recompute: the part that backward computes again. The last one is train_context's, and keeps
// attention's output.
enum { RECOMPUTE_NONE, RECOMPUTE_GELU, RECOMPUTE_LAYER, RECOMPUTE_BUT_ATTENTION };

#define LR_SCHEDULES "cosine|linear"  // --lr-schedule, in the order of LRSchedule

// --schedule
typedef enum {
    SCHEDULE_GPIPE,
    SCHEDULE_1F1B,
    SCHEDULE_INTERLEAVED,
    SCHEDULE_ZB_H1,
    SCHEDULE_ZB_AUTO,
    SCHEDULE_ZB_V,  // from here on train_v's: two chunks a stage in a V
    SCHEDULE_V_HALF,
    SCHEDULE_DUALPIPE_V
} Schedule;

#define ATTENTION_MAX_HEAD_SIZE \
    512  // channels of a head that the attention kernels can hold

#endif
