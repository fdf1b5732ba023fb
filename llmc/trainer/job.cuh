// job.cuh: the ranks of one job: start, devices, communicators, and an end for all of them
// when one fails.
//
// defines: NCCL_CHECK, NCCL_FLOATX, Job, job_block_signals, job_listen, job_signalled,
//          job_start, job_check_launcher, job_check_devices, job_first_failure, job_agree,
//          job_dry_run, job_connect, job_reset_traffic, job_check_ranks, job_finish
#ifndef LLMC_JOB_CUH
#define LLMC_JOB_CUH

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <mpi.h>
#include <nccl.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "llmc/kernels/cuda_common.cuh"
#include "llmc/host/error.h"
#include "llmc/host/memory.h"

static inline void nccl_check(ncclResult_t result, const char *file, int line,
                              const char *what) {
    if (result == ncclSuccess) return;
    fprintf(stderr, "error: NCCL: %s at %s:%d: %s: %s\n", ncclGetErrorString(result), file,
            line, what, ncclGetLastError(NULL));
    _exit(1);
}
// Ends the process on a NCCL error, and with it the job: mpirun kills the others when one
// exits without finalising.
#define NCCL_CHECK(call) nccl_check((call), __FILE__, __LINE__, #call)

#ifdef PRECISION_FP32
#define NCCL_FLOATX ncclFloat
#else
#define NCCL_FLOATX ncclBfloat16
#endif

enum { JOB_GROUPS = 16 };

typedef struct {
    int rank, size, local_rank, local_size;  // local: among the ranks of this node
    int device, devices;  // this rank's, and how many it sees: 0 without a driver
    ncclComm_t world;
    ncclComm_t groups[JOB_GROUPS];  // [group_count] split from the world, for job_finish to
                                    // destroy
    size_t group_count;
} Job;

// Opens closed standard descriptors. The next file must not get the number of stdout or
// stderr: messages end up in it.
static inline void job_open_standard(void) {
    for (int fd = 0; fd < 3; fd++) {
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd) exit(1);
    }
}

// Sets up Open MPI without mpirun: no daemon, and no session folder under $TMPDIR. Such
// programs would share one folder, and one that ends would remove it while another starts,
// which then fails.
static inline void job_start_alone(void) {
    static const char *const launched[] = {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK",
                                           "SLURM_PROCID"};
    setenv("OMPI_MCA_ess_singleton_isolated", "1", 0);
    for (int i = 0; i < 4; i++)
        if (getenv(launched[i])) return;
    setenv("OMPI_MCA_orte_create_session_dirs", "0", 0);
}

// The last signal that asked for an end: 0 if none came, JOB_STARTING while they still end
// the program. Atomic.
enum { JOB_STARTING = -1 };
static int job_signal = JOB_STARTING;

// Waits for signals in a thread of its own. Before training a signal has its usual effect
// on the whole program.
static inline void *job_await_signals(void *signals) {
    for (int number;;) {
        sigset_t one;
        if (sigwait((const sigset_t *)signals, &number) != 0) continue;
        if (__atomic_load_n(&job_signal, __ATOMIC_SEQ_CST) != JOB_STARTING) {
            __atomic_store_n(&job_signal, number, __ATOMIC_SEQ_CST);
            continue;
        }
        sigemptyset(&one);
        sigaddset(&one, number);
        pthread_sigmask(SIG_UNBLOCK, &one, NULL);
        raise(number);  // ends the program, unless its parent ignores this signal
        pthread_sigmask(SIG_BLOCK, &one, NULL);
    }
    return NULL;
}

// Blocks the signals that ask for an end, in this thread and in all that it and libraries
// will start. Another thread waits for the signals. There is no handler, because its frame
// would lie on the stack of the interrupted code. oneDNN's matrix products keep the address
// of their own buffer in the stack pointer. SIGCONT asks for no end. mpirun sends it first
// to end the ranks, but `fg` and a Slurm job that continues send it as well.
static inline void job_block_signals(void) {
    static const int numbers[] = {SIGTERM, SIGINT, SIGUSR1, SIGHUP};
    static sigset_t signals;
    pthread_t thread;
    sigemptyset(&signals);
    for (int number : numbers) {
        struct sigaction now = {};
        sigaction(number, NULL, &now);
        if (number != SIGHUP || now.sa_handler != SIG_IGN)
            sigaddset(&signals, number);  // nohup ignores SIGHUP
    }
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    if (pthread_create(&thread, NULL, job_await_signals, &signals) == 0) return;
    fprintf(stderr, "error: no thread can be started\n");
    exit(1);
}

// From here on a signal does not end the program; job_signalled reports it.
static inline void job_listen(void) {
    __atomic_store_n(&job_signal, 0, __ATOMIC_SEQ_CST);
}

static inline bool job_signalled(void) {
    return __atomic_load_n(&job_signal, __ATOMIC_SEQ_CST) > 0;
}

// Starts MPI and gives this rank its device (device = local rank). From here on only rank
// 0's stdout is seen.
static inline void job_start(Job *job, int *argc, char ***argv) {
#ifdef NCCL_MPI_HELPER
    int wanted = MPI_THREAD_MULTIPLE, provided;  // a helper thread carries NCCL's calls
#else
    int wanted = MPI_THREAD_FUNNELED, provided;
#endif
    MPI_Comm node;
    *job = {};  // no groups yet
    job_open_standard();
    job_block_signals();  // before any library starts a thread
    // Streams that share a hardware queue wait for each other.
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    job_start_alone();
    if (MPI_Init_thread(argc, argv, wanted, &provided) != MPI_SUCCESS) exit(1);
    if (provided < wanted) {
        fprintf(stderr, "error: this MPI does not support MPI_THREAD_MULTIPLE\n");
        exit(1);
    }
    MPI_Comm_rank(MPI_COMM_WORLD, &job->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &job->size);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node);
    MPI_Comm_rank(node, &job->local_rank);
    MPI_Comm_size(node, &job->local_size);
    if (cudaGetDeviceCount(&job->devices) != cudaSuccess)
        job->devices = 0;  // enough for --help and --dry-run
    if (job->devices)
        CUDA_CHECK(cudaSetDevice(job->device = job->local_rank % job->devices));
    MPI_Comm_free(&node);
#ifdef _OPENMP
    // Ranks of one node share its cores.
    if (!getenv("OMP_NUM_THREADS"))
        omp_set_num_threads(omp_get_num_procs() > job->local_size
                                ? omp_get_num_procs() / job->local_size
                                : 1);
#endif
    if (job->rank != 0 && !freopen("/dev/null", "w", stdout)) exit(1);
}

// Refuses a rank that is alone though its launcher has started several: each would train
// the same model by itself. This happens if the launcher and this program's MPI do not know
// each other, as srun without PMIx. mpirun's own count comes first, since srun may have
// started mpirun. A batch script has no SLURM_STEP_NUM_TASKS.
static inline bool job_check_launcher(const Job *job, Error *err) {
    static const char *const counts[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE",
                                         "SLURM_STEP_NUM_TASKS"};
    int i = 0;
    while (i < 2 && !getenv(counts[i])) i++;
    unsigned long long started = getenv(counts[i]) ? strtoull(getenv(counts[i]), NULL, 10)
                                                   : 1;
    if (job->size > 1 || started <= 1) return true;
    return error_set(err,
                     "%llu ranks were started, but MPI finds only this one: use srun "
                     "--mpi=pmix, or the mpirun of the "
                     "MPI that this program was built with (for separate runs unset %s)",
                     started, counts[i]);
}

// Refuses devices that the trainer cannot run on: kernels need compute capability 8.0. NCCL
// needs a GPU for every rank; over MPI, ranks can share one. A rank that sees one GPU may
// see its own: then NCCL finds two ranks with one GPU.
static inline bool job_check_devices(const Job *job, struct cudaDeviceProp *prop,
                                     Error *err) {
    cudaError_t error = cudaGetDeviceProperties(prop, job->device);
    if (error != cudaSuccess)
        return error_set(err, "no GPU can be used: %s", cudaGetErrorString(error));
    if (prop->major < 8)
        return error_set(
            err,
            "%s has compute capability %d.%d: 8.0 is needed, as an A100 or RTX 3090 has it",
            prop->name, prop->major, prop->minor);
#ifndef NCCL_OVER_MPI
    if (job->devices > 1 && job->local_size > job->devices)
        return error_set(err,
                         "%d ranks on a node with %d GPUs share one: start one rank per "
                         "GPU, or build with NCCL=mpi, "
                         "where ranks may share a GPU",
                         job->local_size, job->devices);
#endif
    return true;
}

// Returns the lowest failing rank, or job->size if none failed. All ranks call it.
static inline int job_first_failure(const Job *job, bool ok) {
    int mine = ok ? job->size : job->rank, first;
    MPI_Allreduce(&mine, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    return first;
}

// Ends the job unless all ranks are ok; the lowest failing rank prints why. Code 2 refuses
// input before any work. All ranks call it.
static inline void job_agree(const Job *job, bool ok, const Error *err, int code = 2) {
    int first = job_first_failure(job, ok);
    if (first == job->size) return;
    fflush(stdout);
    if (job->rank == first) fprintf(stderr, "error: %s\n", err->text);
    fflush(stderr);
    MPI_Finalize();
    exit(code);
}

// Prints the memory that every rank needs, a row per rank, and ends MPI: --dry-run.
// mine[4]: in MiB. All ranks call it.
static inline int job_dry_run(const Job *job, const double *mine) {
    double *all = (double *)host_alloc(job->size, 4 * sizeof(double));
    MPI_Gather(mine, 4, MPI_DOUBLE, all, 4, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    printf("MiB per rank      weights    gradients    optimizer  activations\n");
    for (int rank = 0; rank < job->size && job->rank == 0; rank++) {
        printf("%12d", rank);
        for (int i = 0; i < 4; i++) printf(" %12.1f", all[rank * 4 + i]);
        printf("\n");
    }
    free(all);
    return MPI_Finalize();
}

// Makes the communicator of all ranks; the others are split from it.
static inline void job_connect(Job *job) {
    ncclUniqueId id;
    if (job->rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
    NCCL_CHECK(ncclCommInitRank(&job->world, job->size, id, job->rank));
}

// Resets the counts of NCCL_TRAFFIC=1, because messages before this call are not training
// traffic. CPU_FIRST_USES=1 lists from here.
static inline void job_reset_traffic(const Job *job) {
#ifndef __CUDACC__
    cpu_runtime().warm = true;
#endif
#ifdef NCCL_OVER_MPI
    for (size_t i = 0; i < job->group_count; i++) ncclMpiResetCounters(job->groups[i]);
    ncclMpiResetCounters(job->world);
#else
    (void)job;
#endif
}

// Ends this rank when NCCL has found that another one is gone. A rank that leaves without
// MPI_Finalize makes mpirun (and srun --kill-on-bad-exit=1) end the others. MPI_Abort would
// too, but Open MPI's sometimes hangs.
static inline void job_check_ranks(const Job *job) {
    for (size_t i = 0; i <= job->group_count; i++) {
        ncclResult_t result = ncclSuccess;
        NCCL_CHECK(
            ncclCommGetAsyncError(i == 0 ? job->world : job->groups[i - 1], &result));
        if (result == ncclSuccess || result == ncclInProgress) continue;
        fprintf(stderr,
                "error: rank %d: another rank has ended, or the network between them: %s\n",
                job->rank, ncclGetErrorString(result));
        fflush(stdout);
        _exit(1);
    }
}

// Ends the job after every rank has done its work.
static inline void job_finish(Job *job) {
    CUDA_CHECK(cudaDeviceSynchronize());
    NCCL_CHECK(ncclGroupStart());
    for (size_t i = 0; i < job->group_count; i++)
        NCCL_CHECK(ncclCommDestroy(job->groups[i]));
    NCCL_CHECK(ncclGroupEnd());
    NCCL_CHECK(ncclCommDestroy(job->world));
    MPI_Finalize();
}

#endif
