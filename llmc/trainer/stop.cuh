// stop.cuh: how a run ends before its last step: a rank gets a signal, and all of them save and leave.
//
// Nobody waits for the end of a step, which may be long: its work is dropped, and the weights before it are saved. But
// the ranks must agree on which step was the last. What decides is the sum over all ranks in trainer_norm: a step in
// which one rank does not take part in it cannot be completed by any, and once all take part it will be by all. So:
//   1. a rank that has a signal tells the others, and so does each that hears of it;
//   2. each then gives the number of the last step in whose sum it takes part, and takes part in no later one;
//   3. the least of these numbers is the last step: those who are still in it complete it, all others drop what they
//      are doing, and all save.
// 2 is a reduction that nobody waits for (MPI_Iallreduce), for a rank that completes a step needs the others' help.
//
// defines: stop_signal, stop_listen, trainer_synchronize, stop_settle, stop_before_sum, stop_close
#include "llmc/trainer.cuh"  // which includes this one where it needs it
#ifndef LLMC_STOP_CUH
#define LLMC_STOP_CUH

static volatile sig_atomic_t stop_signal = 0;

static void on_signal(int number) { stop_signal = number; }

// Open MPI's mpirun, our parent, is about to end the ranks: SIGCONT comes first, SIGTERM a second later, then SIGKILL.
static void on_continue(int number, siginfo_t *info, void *context) {
    (void)context;
    if (info->si_code == SI_USER && info->si_pid == getppid()) stop_signal = number;
}

// From here on signals do not end this process; it looks for them whenever it waits. mpirun passes SIGUSR1 on at once.
static inline void stop_listen(Trainer *m) {
    if (m->opt.simulate) return;  // it has nothing to save: signals end it
    static const int numbers[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1};
    struct sigaction action, before;
    memset(&action, 0, sizeof action);
    MPI_Comm_dup(MPI_COMM_WORLD, &m->ending.comm);
    m->ending.contributed = m->progress.step;
    action.sa_flags = SA_RESTART;
    action.sa_handler = on_signal;
    for (int i = 0; i < 4; i++) {
        sigaction(numbers[i], NULL, &before);
        bool nohup = numbers[i] == SIGHUP && before.sa_handler == SIG_IGN;
        if (!nohup) sigaction(numbers[i], &action, NULL);
    }
    // Not where mpirun was told to pass on Ctrl-Z and what ends it.
    if (!getenv("OMPI_COMM_WORLD_SIZE") || getenv("OMPI_MCA_orte_forward_job_control")) return;
    action.sa_flags |= SA_SIGINFO;
    action.sa_sigaction = on_continue;
    sigaction(SIGCONT, &action, NULL);
}

// Tells the ranks 1, 2, 4, ... behind this one, and gives `last` to the agreement.
static inline void stop_vote(Trainer *m, unsigned long long last) {
    Stop *s = &m->ending;
    MPI_Request sent;
    for (int away = 1; away < m->job.size; away *= 2) {
        MPI_Isend(&s->nothing, 0, MPI_BYTE, (m->job.rank + away) % m->job.size, 0, s->comm, &sent);
        MPI_Request_free(&sent);
    }
    s->known = true;
    s->mine = last;
    MPI_Iallreduce(&s->mine, &s->last, 1, MPI_UNSIGNED_LONG_LONG, MPI_MIN, s->comm, &s->request);
}

// Learns of a stop; leaves, and does not return, when all ranks have agreed and this one has completed the last step.
static inline void stop_poll(Trainer *m) {
    Stop *s = &m->ending;
    if (m->opt.simulate) return;  // a simulation has nothing to save: signals end it
    int there = stop_signal != 0, done = s->agreed;
    bool before = job_open_memory(true);
    if (!s->known && !there) MPI_Iprobe(MPI_ANY_SOURCE, 0, s->comm, &there, MPI_STATUS_IGNORE);
    if (!s->known && there) stop_vote(m, s->contributed);
    if (s->known && !s->agreed) MPI_Test(&s->request, &done, MPI_STATUS_IGNORE);
    job_open_memory(before);
    s->agreed = done;
    if (s->agreed && s->last <= m->progress.step) trainer_leave(m);
}

// Lets the device work on; true if a stream, or any if it is NULL, still has work.
static inline bool stop_stream_busy(const Trainer *m, cudaStream_t stream) {
    bool busy = false;
    for (size_t i = 0; i < m->stream_count; i++) {
        if (stream && m->streams[i] != stream) continue;
        cudaError_t state = cudaStreamQuery(m->streams[i]);
        if (state != cudaErrorNotReady) CUDA_CHECK(state);
        busy |= state == cudaErrorNotReady;
    }
    return busy;
}

// Waits for a stream, or for all, as cudaStreamSynchronize does, but not for ever: leaves when the run is stopped, and
// fails when NCCL finds that another rank is gone.
static inline void trainer_synchronize(Trainer *m, cudaStream_t stream = NULL) {
    double asked = seconds_wall();
    for (; !m->opt.simulate && stop_stream_busy(m, stream); sched_yield()) {
        bool now = seconds_wall() - asked >= 0.05;
        if (now || stop_signal || m->ending.known) stop_poll(m);
        if (!now) continue;
        asked = seconds_wall();
        job_check_ranks(&m->job);
    }
    CUDA_CHECK(stream ? cudaStreamSynchronize(stream) : cudaDeviceSynchronize());  // which a virtual clock sees
}

// Before what needs all ranks: if one of them has been asked to stop, waits until all know it, and leaves.
static inline void stop_settle(Trainer *m) {
    stop_poll(m);
    while (m->ending.known) {
        stop_stream_busy(m, NULL);
        sched_yield();
        stop_poll(m);
    }
}

// Before this rank's part of the sum that decides on a step: the last moment to stop without it.
static inline void stop_before_sum(Trainer *m) {
    stop_settle(m);
    m->ending.contributed = m->progress.step + 1;
}

// The end of the last step's work, on all ranks. Leaves if one of them is leaving.
static inline void stop_close(Trainer *m) {
    Stop *s = &m->ending;
    if (m->opt.simulate) return;
    if (!s->known) stop_vote(m, ULLONG_MAX);
    while (!s->agreed) {
        stop_stream_busy(m, NULL);
        sched_yield();
        stop_poll(m);
    }
    int there = 1;
    for (MPI_Iprobe(MPI_ANY_SOURCE, 0, s->comm, &there, MPI_STATUS_IGNORE); there;) {
        MPI_Recv(&s->nothing, 0, MPI_BYTE, MPI_ANY_SOURCE, 0, s->comm, MPI_STATUS_IGNORE);
        MPI_Iprobe(MPI_ANY_SOURCE, 0, s->comm, &there, MPI_STATUS_IGNORE);
    }
}

#endif
