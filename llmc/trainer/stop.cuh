// stop.cuh: a signal to one rank ends the run: all ranks save the last completed step and leave.
//
// A step may be long, so a signal drops it instead of waiting for its end. But the ranks must agree on the
// last completed one. The sum over all ranks in trainer_norm decides: without one rank's part no rank can complete the
// step; with all parts every rank will. So:
//   1. a rank with a signal tells the others, and each rank that hears of it passes it on;
//   2. each rank then votes: the number of the last step to whose sum it contributes. It contributes to no later one;
//   3. the least vote is the last step. Ranks still in it complete it, all others drop their work, and all save.
// The vote is a reduction that does not block (MPI_Iallreduce), for a rank may need the others' help to complete a
// step. A rank that is through with the run votes too, for no last step, and so does one that hears of it after its
// part of the last sum: such a vote alone stops nothing. A simulation does not listen: it has nothing to save, and
// signals end it. trainer.cuh includes it.
//
// defines: stop_signal, stop_listen, trainer_synchronize, stop_settle, stop_close
#ifndef LLMC_STOP_CUH
#define LLMC_STOP_CUH

static volatile sig_atomic_t stop_signal = 0;

static void on_signal(int number) { stop_signal = number; }

// Catches signals from here on. The process looks for them whenever it waits. mpirun passes SIGUSR1 on at once. SIGCONT
// is none of them: mpirun begins with it to end the ranks, but `fg` and a Slurm job that goes on send it as well.
static inline void stop_listen(Trainer *m) {
    static const int numbers[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1};
    struct sigaction action, before;
    memset(&action, 0, sizeof action);
    MPI_Comm_dup(MPI_COMM_WORLD, &m->ending.comm);
    m->ending.listens = true;
    m->ending.contributed = m->progress.step;
    action.sa_flags = SA_RESTART;
    action.sa_handler = on_signal;
    for (int i = 0; i < 4; i++) {
        sigaction(numbers[i], NULL, &before);
        bool nohup = numbers[i] == SIGHUP && before.sa_handler == SIG_IGN;
        if (!nohup) sigaction(numbers[i], &action, NULL);
    }
}

// Tells the ranks 1, 2, 4, ... behind this one, and votes for `last`.
static inline void stop_vote(Trainer *m, unsigned long long last) {
    Stop *s = &m->ending;
    MPI_Request sent;
    for (int away = 1; away < m->job.size; away *= 2) {
        MPI_Isend(NULL, 0, MPI_BYTE, (m->job.rank + away) % m->job.size, 0, s->comm, &sent);
        MPI_Request_free(&sent);
    }
    s->known = true;
    s->mine = last;
    MPI_Iallreduce(&s->mine, &s->last, 1, MPI_UNSIGNED_LONG_LONG, MPI_MIN, s->comm, &s->request);
}

// Votes once a signal is known. Leaves, and does not return, when all have voted and this rank has completed the last
// step.
static inline void stop_poll(Trainer *m) {
    Stop *s = &m->ending;
    if (!s->listens) return;
    int there = stop_signal != 0, done = s->agreed;
    bool before = job_open_memory(true);
    if (!s->known && !there) MPI_Iprobe(MPI_ANY_SOURCE, 0, s->comm, &there, MPI_STATUS_IGNORE);
    bool through = !stop_signal && s->contributed >= m->opt.steps;
    if (!s->known && there) stop_vote(m, through ? ULLONG_MAX : s->contributed);
    if (s->known && !s->agreed) MPI_Test(&s->request, &done, MPI_STATUS_IGNORE);
    job_open_memory(before);
    s->agreed = done;
    if (s->agreed && s->last <= m->progress.step) trainer_leave(m);
}

// Lets the device work. True if the stream, or any stream if it is NULL, still has work.
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

// Waits for a stream, or for all, like cudaStreamSynchronize. But it leaves when the run is stopped, and fails when
// NCCL finds that another rank has ended.
static inline void trainer_synchronize(Trainer *m, cudaStream_t stream = NULL) {
    double asked = seconds_wall();
    for (; m->ending.listens && stop_stream_busy(m, stream); sched_yield()) {
        bool now = seconds_wall() - asked >= 0.05;
        if (now || stop_signal || m->ending.known) stop_poll(m);
        if (!now) continue;
        asked = seconds_wall();
        job_check_ranks(&m->job);
    }
    CUDA_CHECK(stream ? cudaStreamSynchronize(stream) : cudaDeviceSynchronize());  // which a virtual clock sees
}

static inline void stop_wait(Trainer *m) {
    stop_stream_busy(m, NULL);
    sched_yield();
    stop_poll(m);
}

// Leaves if a stop is known: waits until all ranks know it. Called before work that needs all ranks.
static inline void stop_settle(Trainer *m) {
    stop_poll(m);
    while (m->ending.known && !(m->ending.agreed && m->ending.last == ULLONG_MAX)) stop_wait(m);
}

// Ends the listening after the last step's work, on all ranks. Leaves if one of them is leaving.
static inline void stop_close(Trainer *m) {
    Stop *s = &m->ending;
    if (!s->listens) return;
    if (!s->known) stop_vote(m, ULLONG_MAX);
    while (!s->agreed) stop_wait(m);
    for (int there = 1; there;) {
        MPI_Iprobe(MPI_ANY_SOURCE, 0, s->comm, &there, MPI_STATUS_IGNORE);
        if (there) MPI_Recv(NULL, 0, MPI_BYTE, MPI_ANY_SOURCE, 0, s->comm, MPI_STATUS_IGNORE);
    }
}

#endif
