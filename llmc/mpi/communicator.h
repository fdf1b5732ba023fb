// communicator.h: communicators and their life: how ranks find each other, split, count their traffic and
// end.
#ifndef LLMC_MPI_COMMUNICATOR_H
#define LLMC_MPI_COMMUNICATOR_H

#include "llmc/mpi/connect.h"

namespace nccl_mpi {

inline ncclComm_t new_communicator(MPI_Comm mpi, const std::string &name) {
    ncclComm_t comm = new ncclComm();
    comm->mpi = mpi;
    MPI_Comm_rank(mpi, &comm->rank);
    MPI_Comm_size(mpi, &comm->size);
    comm->name = name;
    clock_communicator(comm);
    comm->sent_to.assign(comm->size, 0);
    comm->received_from.assign(comm->size, 0);
    comm->connected_to.assign(comm->size, 0);
    comm->connected_from.assign(comm->size, 0);
    return comm;
}

// A unique id names the rank that made it, and which of its ids it is.
struct Id {
    char magic[8];
    int32_t creator, tag;
};

}  // namespace nccl_mpi

inline const char *ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess: return "no error";
        case ncclUnhandledCudaError: return "unhandled cuda error";
        case ncclSystemError: return "unhandled system error";
        case ncclInternalError: return "internal error";
        case ncclInvalidArgument: return "invalid argument";
        case ncclInvalidUsage: return "invalid usage";
        case ncclRemoteError: return "remote process exited or there was a network error";
        case ncclInProgress: return "operation in progress";
        default: return "unknown result code";
    }
}

// One sentence about the last call that failed, "" before.
inline const char *ncclGetLastError(ncclComm_t) { return nccl_mpi::state().last_error.c_str(); }

// Errors end the job at once, so a communicator that can be asked is well.
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    if (!comm || !error) return nccl_mpi::fail(ncclInvalidArgument, "ncclCommGetAsyncError: null argument");
    *error = ncclSuccess;
    return ncclSuccess;
}

// Whoever calls this must take part in the communicator; hand the id to the others, for instance with
// MPI_Bcast.
inline ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    if (!id) return nccl_mpi::fail(ncclInvalidArgument, "ncclGetUniqueId: null argument");
    nccl_mpi::Id mine = {"llmcmpi", 0, 16384 + (int32_t)(nccl_mpi::state().unique_ids++ % 16384)};
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    mine.creator = rank;
    memset(id, 0, sizeof *id);
    memcpy(id, &mine, sizeof mine);
    return ncclSuccess;
}

// Blocks until all nranks ranks have called it. They tell the id's creator who they are, and it tells all who
// all are, on MPI_COMM_WORLD with tags from 16384 on.
inline ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId unique, int rank) {
    nccl_mpi::Id id;
    memcpy(&id, &unique, sizeof id);
    int world, world_rank;
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    if (!comm || nranks < 1 || nranks > world || rank < 0 || rank >= nranks ||
        strcmp(id.magic, "llmcmpi") != 0) {
        return nccl_mpi::fail(ncclInvalidArgument,
                              "ncclCommInitRank: rank %d of %d with %d MPI ranks, or a wrong id", rank,
                              nranks, world);
    }
    nccl_mpi::delays_start();
    std::string error;
    if (!nccl_mpi::queue_start(&error))
        return nccl_mpi::fail(ncclInvalidUsage, "ncclCommInitRank: %s", error.c_str());
    if (nccl_mpi::simulates()) return *comm = nccl_mpi::simulated_communicator("world", true), ncclSuccess;
    std::vector<int> members(nranks, -1);
    int me[3] = {rank, world_rank, nranks}, them[3];
    MPI_Request request;
    if (world_rank == id.creator) {
        members[rank] = world_rank;
        for (int i = 1; i < nranks; i++) {
            MPI_Irecv(them, 3, MPI_INT, MPI_ANY_SOURCE, id.tag, MPI_COMM_WORLD, &request);
            nccl_mpi::wait_for(&request, "ncclCommInitRank");
            if (them[2] != nranks || members[them[0]] >= 0) {
                fprintf(stderr,
                        "nccl: ncclCommInitRank was called as rank %d of %d by MPI rank %d, as rank %d of %d "
                        "by %d\n",
                        rank, nranks, world_rank, them[0], them[2], them[1]);
                nccl_mpi::end_job(0);
            }
            members[them[0]] = them[1];
        }
        for (int i = 0; i < nranks; i++) {
            if (i != rank) MPI_Send(members.data(), nranks, MPI_INT, members[i], id.tag, MPI_COMM_WORLD);
        }
    } else {
        MPI_Send(me, 3, MPI_INT, id.creator, id.tag, MPI_COMM_WORLD);
        MPI_Irecv(members.data(), nranks, MPI_INT, id.creator, id.tag, MPI_COMM_WORLD, &request);
        nccl_mpi::wait_for(&request, "ncclCommInitRank");
    }
    MPI_Group all, some;
    MPI_Comm mpi;
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    MPI_Group_incl(all, nranks, members.data(), &some);
    MPI_Comm_create_group(MPI_COMM_WORLD, some, id.tag, &mpi);
    MPI_Group_free(&some);
    MPI_Group_free(&all);
    *comm = nccl_mpi::new_communicator(mpi, nranks == world ? "world" : "part of the world");
    return ncclSuccess;
}

// Beyond NCCL: a simulation, where most ranks do not exist, has to be told who the ranks of this rank's part of the
// next split are, in the order of their keys.
inline void ncclMpiMembers(const int *ranks, int count) { nccl_mpi::name_members(ranks, count); }

// All ranks of comm call it, with nothing of comm in flight; those with the same colour form a communicator, ordered
// by key, then by rank. NCCL_SPLIT_NOCOLOR gives none (NULL). config->commName names it in reports.
inline ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
                                  ncclConfig_t *config) {
    if (!comm || !newcomm || color < NCCL_SPLIT_NOCOLOR) {
        return nccl_mpi::fail(ncclInvalidArgument, "ncclCommSplit: null argument or a negative colour");
    }
    if (nccl_mpi::state().group_depth > 0)
        return nccl_mpi::fail(ncclInvalidUsage, "ncclCommSplit inside a group");
    int least = config && config->minCTAs != NCCL_CONFIG_UNDEF_INT ? config->minCTAs : 1;
    if (least < 1 || (config && config->maxCTAs != NCCL_CONFIG_UNDEF_INT && config->maxCTAs < least))
        return nccl_mpi::fail(ncclInvalidArgument, "ncclCommSplit: minCTAs %d, maxCTAs %d", least, config->maxCTAs);
    if (comm->finished != comm->issued)
        return nccl_mpi::fail(ncclInvalidUsage, "ncclCommSplit of %s, which has operations in flight",
                              comm->name.c_str());
    const char *name = config ? config->commName : NULL;
    if (nccl_mpi::simulates()) {
        *newcomm = nccl_mpi::simulated_communicator(name ? name : "part", color != NCCL_SPLIT_NOCOLOR);
        return ncclSuccess;
    }
    // Everybody arrives before MPI_Comm_split, which could not say who is missing.
    nccl_mpi::Meeting meeting;
    nccl_mpi::meet_begin(&meeting, comm, "ncclCommSplit");
    nccl_mpi::meet_end(&meeting, "ncclCommSplit of " + comm->name);
    MPI_Comm mpi;
    MPI_Comm_split(comm->mpi, color == NCCL_SPLIT_NOCOLOR ? MPI_UNDEFINED : color, key, &mpi);
    *newcomm = NULL;
    if (mpi == MPI_COMM_NULL) return ncclSuccess;
    *newcomm = nccl_mpi::new_communicator(mpi, name ? name : comm->name + "/" + std::to_string(color));
    return ncclSuccess;
}

inline ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
    if (!comm || !count) return nccl_mpi::fail(ncclInvalidArgument, "ncclCommCount: null argument");
    *count = comm->size;
    return ncclSuccess;
}

inline ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    if (!comm || !rank) return nccl_mpi::fail(ncclInvalidArgument, "ncclCommUserRank: null argument");
    *rank = comm->rank;
    return ncclSuccess;
}

// Beyond NCCL: what this rank did on the communicator since it was made or the counters were reset.
inline NcclMpiCounter ncclMpiCounter(ncclComm_t comm, NcclMpiOp op) { return comm->counters[op]; }
inline void ncclMpiResetCounters(ncclComm_t comm) { memset(comm->counters, 0, sizeof comm->counters); }

// Completes what is queued, then frees. Returns when all ranks of comm have called it; in a group, at its end.
inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    nccl_mpi::State &s = nccl_mpi::state();
    if (comm && s.group_depth > 0) s.ending.push_back(comm);
    else if (comm) nccl_mpi::destroy({comm});
    return ncclSuccess;
}

#endif
