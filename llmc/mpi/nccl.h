// nccl.h: the NCCL calls that the trainers use, carried by MPI. For ranks without GPUs
// (with the stand-ins of llmc/cpu) and for several ranks that share one GPU. Names,
// arguments and error codes are NCCL's. Call MPI_Init_thread first. A CPU needs
// MPI_THREAD_FUNNELED, because one thread makes all calls. A GPU has a helper thread and
// needs MPI_THREAD_MULTIPLE.
//
// As strict as NCCL, or stricter:
//   - Operations of one communicator run one after the other in the order of issue, on any
//     streams. Operations of different communicators overlap.
//   - A group has one communicator and one stream. Its operations progress together.
//   - A send completes only when its receive has begun, so a wrong order of sends and
//     receives hangs. After CPU_STALL_SECONDS (default 30) every rank then prints the peers
//     it waits for, and the job ends.
//   - Ranks may disagree about an operation, count, type, reduction or root. Then both values
//     are reported.
//   - The first use of a communicator, where NCCL's host waits, is refused beside other
//     operations: see communicator.h.
//   - A reduction adds in rank order (see operation.h), which gives the same bits on every
//     rank, every time.
//
// Variables of the environment:
//   NCCL_ORDER=ring:SEED  Adds in the order of NCCL's ring instead. An element's place in the
//                         buffer gives its owner. The sum begins at the rank behind the owner
//                         and goes round to the owner.
//   NCCL_ORDER=any:SEED   Gives every communicator a ring of its own, as NCCL's search may.
//   NCCL_DELAY=random:SEED:MICROSECONDS
//                         Delays messages at random; results must not depend on it.
//   NCCL_TRAFFIC=1        Prints calls and bytes of each communicator at the end of the run.
//
// When a rank dies, mpirun notices it and kills the others, with a message (srun needs
// --kill-on-bad-exit=1). When mpirun dies, Open MPI's ranks lose their connection to it and
// exit. The watchdog here serves the case that no launcher sees: all processes live, and
// none progresses.
//
// A host that blocks outside of CUDA (MPI_Barrier, MPI_Bcast, ...) does not run the CPU's
// streams. Synchronise the streams first if another rank needs their queued work to get
// there.
#ifndef LLMC_MPI_NCCL_H
#define LLMC_MPI_NCCL_H

#include "llmc/mpi/communicator.h"

#define NCCL_OVER_MPI \
    1  // tells programs that ranks may share a device, and that traffic is counted

namespace nccl_mpi {

// Hands the open group to its stream.
inline ncclResult_t issue_open() {
    std::shared_ptr<Group> g = std::move(state().open);
    ncclResult_t result = g ? first_uses(g.get()) : ncclSuccess;
    if (!g || result != ncclSuccess) return result;
    ncclComm_t comm = g->comm;
    g->turn = comm->issued++;
    if (g->ops.size() > 1) g->name = "ncclGroup: ";
    for (size_t i = 0; i < g->ops.size(); i++) {
        Operation *op = &g->ops[i];
        Header *call = &op->call;
        uint64_t used = comm->uses[way_of(*op)]++;
        call->sequence = is_p2p(op) ? used : comm->collectives++;
        ring_traffic(&comm->counters[call->op], (NcclMpiOp)call->op, call->count, op->width,
                     (size_t)comm->size, (size_t)comm->rank, (size_t)call->root);
        if (i < 4)
            g->name += (i ? " and " : "") + describe(call);
        else if (i == 4)
            g->name += " and more";
    }
    g->name += " (" + comm->name + ")";
    std::string error = queue_group(g);
    clock_issue(g);
    return error.empty() ? ncclSuccess : fail(ncclSystemError, "%s", error.c_str());
}

// Checks a call and queues it. redop and root are -1 where the operation has none; root is
// also the peer of a message. In place means: this rank's part of the larger buffer is the
// smaller one.
inline ncclResult_t call(NcclMpiOp kind, const void *send, void *recv, size_t count,
                         int type, int redop, int root, ncclComm_t comm,
                         cudaStream_t stream) {
    const char *name = nccl_mpi_op_name(kind);
    if (!comm) return fail(ncclInvalidArgument, "%s: no communicator", name);
    size_t width = NCCL_MPI_TYPES[type].bytes, bytes = count * width;
    size_t all = bytes * (size_t)comm->size;
    if (kind >= NCCL_MPI_BROADCAST && (root < 0 || root >= comm->size))
        return fail(ncclInvalidArgument, "%s: rank %d does not exist, %s has %d", name,
                    root, comm->name.c_str(), comm->size);
    if (count > INT_MAX && !simulates())
        return fail(ncclInvalidArgument, "%s: a count of %zu is beyond an MPI message",
                    name, count);
    Operation op = Operation();
    op.comm = comm;
    op.call = {kind, type, redop, root, count, 0};
    op.send = (const char *)send;
    op.recv = (char *)recv;
    op.width = width;
    if (kind != NCCL_MPI_RECV && (kind != NCCL_MPI_BROADCAST || root == comm->rank))
        op.reads = kind == NCCL_MPI_REDUCE_SCATTER ? all : bytes;
    if (kind != NCCL_MPI_SEND && (kind != NCCL_MPI_REDUCE || root == comm->rank))
        op.writes = kind == NCCL_MPI_ALL_GATHER ? all : bytes;
    const auto outside = [](const void *p, size_t size) {
        return size && !is_device_memory(p, size);
    };
    bool source = outside(send, op.reads);
    if (source || outside(recv, op.writes))
        return fail(ncclInvalidArgument,
                    "%s: %zu bytes at %p are not inside one device allocation", name,
                    source ? op.reads : op.writes, source ? send : recv);
    const char *from = op.send, *to = op.recv;
    size_t part = bytes * (size_t)comm->rank;
    size_t own = kind == NCCL_MPI_REDUCE_SCATTER ? part : 0;
    bool in_place = from + own == to + (kind == NCCL_MPI_ALL_GATHER ? part : 0);
    bool both = op.reads && op.writes;
    if (!in_place && both && from < to + op.writes && to < from + op.reads)
        return fail(ncclInvalidArgument, "%s: the buffers overlap without being in place",
                    name);
    State &s = state();
    if (!s.open) {
        s.open.reset(new Group());
        s.open->comm = comm;
        s.open->stream = stream;
    }
    if (s.open->comm != comm || s.open->stream != stream)
        return fail(
            ncclInvalidUsage,
            "%s: the operations of a group need one communicator and one stream here",
            name);
    s.open->ops.push_back(op);
    return s.group_depth > 0 ? ncclSuccess : issue_open();
}

}  // namespace nccl_mpi

inline ncclResult_t ncclGroupStart() {
    nccl_mpi::state().group_depth++;
    return ncclSuccess;
}

// Issues the operations of the outermost group, or none of them if one was refused.
inline ncclResult_t ncclGroupEnd() {
    nccl_mpi::State &s = nccl_mpi::state();
    if (s.group_depth == 0)
        return nccl_mpi::fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--s.group_depth > 0) return ncclSuccess;
    ncclResult_t error = s.group_error;
    s.group_error = ncclSuccess;
    if (error == ncclSuccess) error = nccl_mpi::issue_open();
    s.open.reset();
    return error;
}

// Reduces over the ranks: recvbuff[i] from every rank's sendbuff[i], count elements each.
// In place: the same pointer.
inline ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count,
                                  ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                                  cudaStream_t stream) {
    return nccl_mpi::call(NCCL_MPI_ALL_REDUCE, sendbuff, recvbuff, count, datatype, op, -1,
                          comm, stream);
}

// Gives rank r part r of the reduction: sendbuff has nranks * recvcount elements. In place:
// recvbuff is part r of sendbuff.
inline ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff,
                                      size_t recvcount, ncclDataType_t datatype,
                                      ncclRedOp_t op, ncclComm_t comm,
                                      cudaStream_t stream) {
    return nccl_mpi::call(NCCL_MPI_REDUCE_SCATTER, sendbuff, recvbuff, recvcount, datatype,
                          op, -1, comm, stream);
}

// Copies rank r's sendbuff to part r of recvbuff, which has nranks * sendcount elements. In
// place: sendbuff is part r of recvbuff.
inline ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount,
                                  ncclDataType_t datatype, ncclComm_t comm,
                                  cudaStream_t stream) {
    return nccl_mpi::call(NCCL_MPI_ALL_GATHER, sendbuff, recvbuff, sendcount, datatype, -1,
                          -1, comm, stream);
}

// Copies the root's sendbuff to every recvbuff; other ranks need no sendbuff. In place: the
// same pointer.
inline ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count,
                                  ncclDataType_t datatype, int root, ncclComm_t comm,
                                  cudaStream_t stream) {
    return nccl_mpi::call(NCCL_MPI_BROADCAST, sendbuff, recvbuff, count, datatype, -1, root,
                          comm, stream);
}

// Reduces over the ranks to the root alone: its recvbuff[i] from every rank's sendbuff[i].
// Other ranks need no recvbuff. In place: the same pointer.
inline ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count,
                               ncclDataType_t datatype, ncclRedOp_t op, int root,
                               ncclComm_t comm, cudaStream_t stream) {
    return nccl_mpi::call(NCCL_MPI_REDUCE, sendbuff, recvbuff, count, datatype, op, root,
                          comm, stream);
}

// Sends to a peer, or to oneself (in a group with the matching call). The k-th send to a peer
// meets its k-th receive.
inline ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype,
                             int peer, ncclComm_t comm, cudaStream_t stream) {
    return nccl_mpi::call(NCCL_MPI_SEND, sendbuff, NULL, count, datatype, -1, peer, comm,
                          stream);
}
inline ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype,
                             int peer, ncclComm_t comm, cudaStream_t stream) {
    return nccl_mpi::call(NCCL_MPI_RECV, NULL, recvbuff, count, datatype, -1, peer, comm,
                          stream);
}

#endif
