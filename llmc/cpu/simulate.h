// simulate.h: a job of many ranks in a few processes of this machine. They run no kernel
// and move no data: only the time of clock.h passes.
//
// All tensor and data ranks of a pipeline stage do the same at the same time. So one
// process for each stage represents them all: it runs the host code of the stage's first
// rank. A collective among ranks of one stage begins when that rank comes to it. In
// messages and collectives between stages the processes exchange times in shared memory.
// Only these times decide when an operation begins, so the order in which the processes get
// there changes nothing. MPI's calls exchange their bytes in the same way.
//
// llmc/mpi/mpi.h and llmc/mpi/timing.h are the MPI and the NCCL of such a job.
//
// defines: cpu_simulation, cpu_process_of, cpu_arrive, cpu_all_arrived, cpu_exchange,
//          cpu_simulate_ranks
#ifndef LLMC_CPU_SIMULATE_H
#define LLMC_CPU_SIMULATE_H

#include <linux/futex.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "stream.h"

// The operations of one communicator to which a process has come. They follow each other,
// so no process is more than one ahead of another, and two times in turn are enough.
struct CpuChannel {
    std::atomic<uint64_t> turns;  // operations so far
    double ready[2];              // ns: when it was ready for the last two
};

// Communicators that all ranks make in turn: two links a stage, and a few more.
enum { CPU_SIMULATED_SPLITS = 2064 };

struct CpuShared {                     // one of each for every process
    std::atomic<uint32_t> bell;        // counts events that may let it continue
    std::atomic<uint64_t> operations;  // enqueued so far
    CpuChannel channels[CPU_SIMULATED_SPLITS + 1];  // the last one is cpu_meet's
    // Bytes that it has yet to show to the others, of which the first are here.
    size_t left;
    char piece[1 << 16];
};

struct CpuSimulation {
    int size, rank;              // of the job
    int stage;                   // of this process
    std::vector<int> ranks;      // the rank that each process is
    std::vector<int> processes;  // 0, 1, ...
    CpuShared *shared;           // of each process
    uint32_t heard;              // this process's bell at its last look
    int splits;  // so far, of all ranks alike: the number of the last communicator
};

inline CpuSimulation &cpu_simulation() {
    static CpuSimulation simulation;
    return simulation;
}

// Returns the process that is this rank, or -1 if another rank's process represents it.
static inline int cpu_process_of(int rank) {
    const std::vector<int> &ranks = cpu_simulation().ranks;
    auto found = std::find(ranks.begin(), ranks.end(), rank);
    return found == ranks.end() ? -1 : (int)(found - ranks.begin());
}

// -------------------------------------------------------------------------------- waiting

// Sleeps until the bell has rung since `heard` was read, a tenth of a second at most. It is
// no stall while the bell rings or another process enqueues.
inline void cpu_simulated_idle() {
    CpuSimulation &s = cpu_simulation();
    CpuShared *mine = &s.shared[s.stage];
    struct timespec patience = {0, 100000000};
    syscall(SYS_futex, &mine->bell, FUTEX_WAIT, s.heard, &patience, NULL, 0);
    static uint64_t before = 0;
    uint64_t all = s.heard = mine->bell.load();
    for (int i : s.processes) all += s.shared[i].operations.load(std::memory_order_relaxed);
    if (all != before) stall_over(&cpu_runtime().stall);
    before = all;
    mine->operations.store(cpu_runtime().ops, std::memory_order_relaxed);
}

// Stores when the last of these processes was ready for the operation of their
// communicator, number `channel`, to which this one has come. False until all have.
static inline bool cpu_all_arrived(int channel, const std::vector<int> &processes,
                                   double *latest) {
    CpuSimulation &s = cpu_simulation();
    uint64_t turns = s.shared[s.stage].channels[channel].turns;
    double last = 0;
    for (int p : processes) {
        const CpuChannel *theirs = &s.shared[p].channels[channel];
        if (theirs->turns < turns) return false;
        last = std::max(last, theirs->ready[turns % 2]);
    }
    return *latest = last, true;
}

// Comes to the next operation of the communicator, ready at `ready`.
static inline void cpu_arrive(int channel, double ready,
                              const std::vector<int> &processes) {
    CpuSimulation &s = cpu_simulation();
    CpuChannel *mine = &s.shared[s.stage].channels[channel];
    mine->ready[(mine->turns + 1) % 2] = ready;
    mine->turns++;
    if (!cpu_all_arrived(channel, processes, &ready)) return;
    for (int p : processes) {
        if (p == s.stage) continue;
        s.shared[p].bell.fetch_add(1);
        syscall(SYS_futex, &s.shared[p].bell, FUTEX_WAKE, 1, NULL, NULL, 0);
    }
}

// ---------------------------------------------------------------------------------- bytes

// Waits until all processes have come here.
static inline void cpu_meet() {
    CpuSimulation &s = cpu_simulation();
    double latest;
    cpu_arrive(CPU_SIMULATED_SPLITS, 0, s.processes);
    while (!cpu_all_arrived(CPU_SIMULATED_SPLITS, s.processes, &latest))
        cpu_simulated_idle();
}

// Shows all processes the bytes of each: calls take(process, piece, first, bytes) for every
// piece. All call it.
template <class Take>
static inline void cpu_exchange(const void *data, size_t bytes, Take take) {
    CpuSimulation &s = cpu_simulation();
    CpuShared *mine = &s.shared[s.stage];
    const size_t size = sizeof mine->piece;
    bool more = true;
    for (size_t first = 0; more; first += size) {
        mine->left = bytes > first ? bytes - first : 0;
        if (mine->left)
            memcpy(mine->piece, (const char *)data + first, std::min(mine->left, size));
        cpu_meet();
        more = false;
        for (int p : s.processes) {
            const CpuShared *theirs = &s.shared[p];
            if (theirs->left) take(p, theirs->piece, first, std::min(theirs->left, size));
            more = more || theirs->left > size;
        }
        cpu_meet();
    }
}

// ------------------------------------------------------------------------------ processes

// Waits for the children and ends with the first exit code that is not 0. The others then
// have two seconds to print.
[[noreturn]] inline void cpu_supervise() {
    struct sigaction alarmed = {};
    alarmed.sa_handler = [](int) {};  // ends the wait
    sigaction(SIGALRM, &alarmed, NULL);
    int code = 0, status;
    while (wait(&status) > 0) {
        int its = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
        if (its != 0 && code == 0) {
            code = its;
            alarm(2);
        }
    }
    _exit(code);
}

// Makes a process of each of first[stages], which are ranks of a job of `size`, and returns
// in each of them. The caller stays behind and waits for them: they die with it. False,
// with errno set, if they cannot be made.
inline bool cpu_simulate_ranks(const int *first, int stages, int size) {
    CpuSimulation &s = cpu_simulation();
    s.size = size;
    s.ranks.assign(first, first + stages);
    const int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_ANONYMOUS;
    void *shared = mmap(NULL, s.ranks.size() * sizeof(CpuShared), protection, flags, -1, 0);
    if (shared == MAP_FAILED) return false;
    s.shared = (CpuShared *)shared;
    for (int i = 0; i < stages; i++) s.processes.push_back(i);
    fflush(NULL);
    pid_t caller = getpid();
    for (int i : s.processes) {
        pid_t pid = fork();
        if (pid < 0) return false;
        if (pid > 0) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != caller) _exit(1);  // it ended before
        s.stage = i;
        s.rank = s.ranks[(size_t)i];
        cpu_idle_hook = cpu_simulated_idle;
        return true;
    }
    cpu_supervise();
}

#endif
