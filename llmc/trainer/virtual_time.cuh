// virtual_time.cuh: the seam of --virtual-time and --simulate. The stand-ins carry them out; a GPU build refuses both
// flags, and its clock is real. trainer.cuh includes it.
//
// defines: trainer_virtual_time, trainer_simulate, trainer_clock_zero, trainer_clock_begin_step,
//          trainer_clock_end_step, trainer_report_clock
#ifndef LLMC_VIRTUAL_TIME_CUH
#define LLMC_VIRTUAL_TIME_CUH

#ifdef CPU_CLOCK
#include "llmc/cpu/virtual_run.cuh"
#else
static inline bool trainer_virtual_time(const Options *o, Error *err) {
    return (!o->virtual_time && !o->simulate) ||
           error_set(err, "--%s needs the trainers that need no GPU: build with make DEVICE=cpu",
                     o->simulate ? "simulate" : "virtual-time");
}
static inline void trainer_simulate(int, char **, unsigned, const Lesson *) {}
static inline void trainer_clock_zero(Trainer *) {}
static inline void trainer_clock_begin_step(void) {}
static inline void trainer_clock_end_step(Trainer *, double) {}
static inline void trainer_report_clock(Trainer *) {}
#endif

#endif
