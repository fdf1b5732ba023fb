// simulate.h: a job of many ranks in a few processes of this machine, which run no kernel and move no data: only time
// passes, that of clock.h.
//
// All tensor and all data ranks of a pipeline stage do the same at the same time. So one process for each stage, which
// runs the host code of its first rank, stands for all of them, and a collective among ranks of one stage begins when
// that rank comes to it. Where ranks of different stages meet, in messages and in collectives over stages, their
// processes exchange times in shared memory. What begins when follows from these times alone, so that the order in
// which the processes get there changes nothing.
//
// cpu_simulate_ranks makes the processes. llmc/mpi/mpi.h and llmc/mpi/timing.h are the MPI and the NCCL of such a job.
#ifndef LLMC_CPU_SIMULATE_H
#define LLMC_CPU_SIMULATE_H

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "stream.h"

// Where the processes of one communicator meet: its operations follow each other, so that nobody is more than one ahead
// of another, and four places in turn are enough.
struct CpuMeetingPlace {
    std::atomic<uint64_t> latest;   // ns: when the last of them was ready
    std::atomic<uint32_t> arrived;
};
struct CpuChannel {
    CpuMeetingPlace places[4];
};

enum { CPU_SIMULATED_SPLITS = 32 };  // communicators that a rank makes, one after the other

struct CpuShared {                   // one of each for every process
    std::atomic<uint32_t> bell;      // counts what may have let it go on
    std::atomic<uint64_t> operations, time;  // how far it is: enqueued so far, and ns of what has run
    CpuChannel channels[CPU_SIMULATED_SPLITS];
};

struct CpuSimulation {
    int size, rank;                  // of the job
    int stages, stage;               // of processes
    std::vector<int> ranks;          // [stages] the rank that each process is
    std::vector<int> sockets;        // [stages] process 0: to each other one; the others: [0] to process 0
    CpuShared *shared;               // [stages]
    uint32_t heard;                  // this process's bell when it last looked for what can go on
    int splits;                      // communicators made so far
    std::vector<int> members;        // ranks of the communicator that is made next
};

inline CpuSimulation &cpu_simulation() {
    static CpuSimulation simulation;
    return simulation;
}

// ---------------------------------------------------------------------------------------------- waiting

static inline void cpu_ring(CpuShared *process) {
    process->bell.fetch_add(1);
    syscall(SYS_futex, &process->bell, FUTEX_WAKE, 1, NULL, NULL, 0);
}

// Sleeps until the bell has rung since `heard` was read, a tenth of a second at most.
inline void cpu_simulated_idle() {
    CpuSimulation &s = cpu_simulation();
    CpuShared *mine = &s.shared[s.stage];
    struct timespec patience = {0, 100000000};
    syscall(SYS_futex, &mine->bell, FUTEX_WAIT, s.heard, &patience, NULL, 0);
    uint32_t now = mine->bell.load();
    if (now != s.heard) stall_over(&cpu_runtime().stall);
    s.heard = now;
    // Others that still enqueue will come to us: that is no stall.
    static uint64_t before = 0;
    uint64_t all = 0;
    for (int i = 0; i < s.stages; i++) all += s.shared[i].operations.load(std::memory_order_relaxed);
    if (all != before) stall_over(&cpu_runtime().stall);
    before = all;
    mine->operations.store(cpu_runtime().ops, std::memory_order_relaxed);
    uint64_t time = 0;
    for (cudaStream_t stream : cpu_runtime().streams) time = std::max(time, stream->times.now);
    mine->time.store(time, std::memory_order_relaxed);
}

// This process has come to a communicator's operation number `turn`, ready at `ready`. `channel` belongs to the
// communicator, which has `processes` of them.
static inline void cpu_arrive(CpuChannel *channel, uint64_t turn, uint64_t ready, const std::vector<int> &processes) {
    CpuSimulation &s = cpu_simulation();
    CpuMeetingPlace *place = &channel->places[turn % 4], *later = &channel->places[(turn + 2) % 4];
    uint64_t latest = place->latest.load();
    while (latest < ready && !place->latest.compare_exchange_weak(latest, ready)) {}
    if (place->arrived.fetch_add(1) + 1 < processes.size()) return;
    later->latest = 0, later->arrived = 0;  // all have left it, and none comes back before we have come to the next one
    for (int p : processes)
        if (p != s.stage) cpu_ring(&s.shared[p]);
}

// When the last of them was ready; false until all have come.
static inline bool cpu_all_arrived(const CpuChannel *channel, uint64_t turn, size_t processes, uint64_t *latest) {
    const CpuMeetingPlace *place = &channel->places[turn % 4];
    if (place->arrived.load() < processes) return false;
    *latest = place->latest.load();
    return true;
}

// ---------------------------------------------------------------------------------------------- bytes

// Process 0 has a socket to each other one. A peer that ends takes the job down, so that errors need no words.
static inline void cpu_socket_write(int fd, const void *data, size_t bytes) {
    for (const char *at = (const char *)data; bytes > 0;) {
        ssize_t n = send(fd, at, bytes, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) _exit(1);
        at += n, bytes -= (size_t)n;
    }
}

static inline void cpu_socket_read(int fd, void *data, size_t bytes) {
    for (char *at = (char *)data; bytes > 0;) {
        ssize_t n = recv(fd, at, bytes, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) _exit(1);
        at += n, bytes -= (size_t)n;
    }
}

// The process that is this rank, or -1: one that others stand for.
static inline int cpu_process_of(int rank) {
    const std::vector<int> &ranks = cpu_simulation().ranks;
    for (size_t i = 0; i < ranks.size(); i++)
        if (ranks[i] == rank) return (int)i;
    return -1;
}

static inline int cpu_socket_to(int process) {
    const CpuSimulation &s = cpu_simulation();
    return s.sockets[s.stage == 0 ? (size_t)process : 0];
}

// ---------------------------------------------------------------------------------------------- processes

static inline double cpu_wall_seconds() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Says every few seconds how far the slowest process is.
static inline void cpu_show_progress(const CpuSimulation &s, double seconds) {
    uint64_t all = 0, time = UINT64_MAX;
    for (int i = 0; i < s.stages; i++) {
        all += s.shared[i].operations.load(std::memory_order_relaxed);
        time = std::min(time, s.shared[i].time.load(std::memory_order_relaxed));
    }
    fprintf(stderr, "simulating: %.0f s, %.1f million operations, the last stage is at %.3f s\n", seconds,
            1e-6 * (double)all, 1e-9 * (double)time);
}

// The first process waits for the others, and ends as they do: with the first exit code that is not 0. Those that are
// left then have two seconds to say why.
[[noreturn]] inline void cpu_supervise(const CpuSimulation &s, std::vector<pid_t> children) {
    int code = 0;
    size_t running = children.size();
    double begun = cpu_wall_seconds(), shown = begun, failed = 0;
    while (running > 0) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG);
        double now = cpu_wall_seconds();
        if (pid > 0) {
            running--;
            for (pid_t &child : children) child = child == pid ? 0 : child;
            int its = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
            if (its != 0 && code == 0) code = its, failed = now;
            continue;
        }
        if (failed > 0 && now - failed > 2) {
            for (pid_t child : children)
                if (child > 0) kill(child, SIGKILL);
        }
        if (now - shown > 5) cpu_show_progress(s, now - begun), shown = now;
        usleep(5000);
    }
    fflush(stderr);
    _exit(code);
}

// Makes a process of each of first[stages], which are ranks of a job of `size`; returns in each of them. The caller
// stays behind to wait for them. False, with errno set, if they cannot be made.
inline bool cpu_simulate_ranks(const int *first, int stages, int size) {
    CpuSimulation &s = cpu_simulation();
    s.size = size;
    s.stages = stages;
    std::vector<int> ranks(first, first + stages);
    s.ranks = ranks;
    const int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_ANONYMOUS;
    void *shared = mmap(NULL, ranks.size() * sizeof(CpuShared), protection, flags, -1, 0);
    if (shared == MAP_FAILED) return false;
    s.shared = (CpuShared *)shared;
    std::vector<int> ours(ranks.size(), -1), theirs(ranks.size(), -1);
    for (size_t i = 1; i < ranks.size(); i++) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) return false;
        ours[i] = pair[0], theirs[i] = pair[1];
    }
    fflush(NULL);
    std::vector<pid_t> children;
    for (int i = 0; i < s.stages; i++) {
        pid_t pid = fork();
        if (pid < 0) {
            for (pid_t child : children) kill(child, SIGKILL);
            return false;
        }
        if (pid > 0) {
            children.push_back(pid);
            continue;
        }
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        s.stage = i;
        s.rank = ranks[(size_t)i];
        s.sockets = i == 0 ? ours : std::vector<int>(1, theirs[(size_t)i]);
        cpu_idle_hook = cpu_simulated_idle;
        return true;
    }
    cpu_supervise(s, children);
}

#endif
