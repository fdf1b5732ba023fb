// test_clock.cu: the virtual clock of the stand-ins against cases worked out by hand. One rank:
// kernels, streams, events, copies, the host, and the same in a simulation. Under mpirun with 2
// or 4 ranks (dev/test/run_clock.sh): messages and collectives too.
#include <nccl.h>

#include "dev/test/check.h"
#include "llmc/kernels/attention.cuh"
#include "llmc/kernels/matmul.cuh"

static Check totals;
static int world_rank, world_size;

// Round numbers: a launch costs the host 1 us, a byte of a kernel takes 1 ns.
static Cluster round_cluster() {
    Cluster c;
    memset(&c, 0, sizeof c);
    strcpy(c.name, "round");
    c.peak_bf16 = 2e12, c.peak_fp32 = 1e12, c.sms = 1, c.hbm_bandwidth = 1e9, c.memory = 1 << 30;
    c.launch_host = 1e-6, c.launch_device = 1e-7;
    c.gemm_efficiency = c.gemm_sustained = 1;
    for (int i = 0; i < 4; i++) c.attention_qk[i] = c.attention_pv[i] = 1e12;
    for (int i = 0; i < 2; i++) c.flash_forward[i] = c.flash_backward[i] = 1e12;
    c.elementwise_efficiency = c.layernorm_forward_efficiency = c.layernorm_backward_efficiency = 1;
    c.softmax_efficiency = c.optimizer_efficiency = 1;
    c.overlap_slowdown = 1.5;
    c.gpus_per_node = 2, c.nics_per_node = 2;
    c.node_bandwidth = 2e9, c.nic_collective_bandwidth = 1e9,
    c.small_latency = c.small_bandwidth = 1;
    c.node_base = 2e-6, c.node_hop = 1e-6, c.net_base = 1e-5;
    c.node_p2p_bandwidth = 1e9, c.node_p2p_latency = 3e-6, c.nic_bandwidth = 5e8,
    c.nic_latency = 7e-6;
    c.attention = ATTENTION_FLASH, c.tensor_overlap = c.pipeline_overlap = c.data_overlap = true;
    c.optimizer_bytes = 30, c.gradient_bytes = 4, c.classifier_bytes = 8;
    return c;
}

__global__ void nothing_kernel(int *touched) { *touched = 1; }

static cudaStream_t streams[3];
static int *device;

// Launches a kernel that takes ns longer than the shortest one.
static void kernel(int stream, double ns) {
    kernel_cost(KERNEL_ELEMENTWISE, (size_t)ns, 1, 0);
    LAUNCH(nothing_kernel, 1, 1, streams[stream])(device);
}

static uint64_t at(int stream) { return streams[stream]->times.now; }
static uint64_t host() { return cpu_clock().host; }

static void begin() {
    CUDA_CHECK(cudaDeviceSynchronize());
    cpu_clock_zero();
}

static cudaEvent_t event() {
    cudaEvent_t e;
    CUDA_CHECK(cudaEventCreate(&e));
    return e;
}

// Checks streams. The host enqueues one launch after the other, at 1000, 2000, ... ns. A
// kernel of n ns takes n + 100.
static void test_streams() {
    begin();
    kernel(0, 900), kernel(0, 1900);
    CUDA_CHECK(cudaStreamSynchronize(streams[0]));
    check(&totals, at(0) == 4000 && host() == 4000,
          "two kernels of 1 and 2 us: 1 + 1 + 2 us, and the host waits");
    begin();
    kernel(0, 100), kernel(0, 100);
    CUDA_CHECK(cudaStreamSynchronize(streams[0]));
    check(&totals, at(0) == 2200 && host() == 2200,
          "kernels shorter than a launch: the host is late");
    check(&totals, streams[0]->times.spent[TIME_HOST] == 1000 + 800,
          "and that is counted as the host's");
    begin();
    LAUNCH(nothing_kernel, 1, 1, streams[0])(device);
    CUDA_CHECK(cudaStreamSynchronize(streams[0]));
    check(&totals, at(0) == 1100,
          "a kernel of which nothing is stated takes what the shortest one takes");
    begin();
    kernel(0, 9900), kernel(1, 400);
    CUDA_CHECK(cudaDeviceSynchronize());
    check(&totals, at(0) == 11000 && at(1) == 2500 && host() == 11000,
          "two streams run beside each other");
}

static void test_events() {
    cudaEvent_t first = event(), last = event(), never = event();
    float ms = 0;
    begin();
    CUDA_CHECK(cudaEventRecord(first, streams[0]));
    kernel(0, 9900);
    CUDA_CHECK(cudaEventRecord(last, streams[0]));
    CUDA_CHECK(cudaStreamWaitEvent(streams[1], last, 0));
    CUDA_CHECK(cudaStreamWaitEvent(streams[2], never, 0));
    kernel(1, 400), kernel(2, 400);
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaEventElapsedTime(&ms, first, last));
    check(&totals, at(1) == 11000 + 500,
          "a stream that waits for an event begins when that has happened");
    check(&totals, at(2) == 3000 + 500, "an event never recorded is not waited for");
    check(&totals, ms == 0.011f, "cudaEventElapsedTime: 11 us, of which the launch is one: %g ms",
          (double)ms);
    begin();
    kernel(0, 900);
    CUDA_CHECK(cudaEventRecord(first, streams[0]));
    kernel(0, 49900);
    CUDA_CHECK(cudaEventSynchronize(first));
    check(&totals, host() == 2000, "the host waits for an event, not for what is behind it");
    kernel(1, 900);
    CUDA_CHECK(cudaDeviceSynchronize());
    check(&totals, at(1) == 4000, "what it enqueues then begins then");
    while (cudaEventQuery(first) != cudaSuccess) {}
    kernel(0, 900);
    while (cudaStreamQuery(streams[0]) != cudaSuccess) {}
    check(&totals, host() == at(0), "a loop over cudaStreamQuery is a synchronisation");
    begin();
    CUDA_CHECK(cudaEventElapsedTime(&ms, first, last));
    check(&totals, ms == 0, "times from before cpu_clock_zero are 0");
    CUDA_CHECK(cudaEventDestroy(first)), CUDA_CHECK(cudaEventDestroy(last)),
        CUDA_CHECK(cudaEventDestroy(never));
}

static void test_costs() {
    static Matmul matmul;
    const Cluster *c = &cpu_clock().cluster;
    floatX *x;
    float *y;
    size_t N = 64, K = 32, M = 48;
    CUDA_CHECK(cudaMalloc(&x, 1 << 20));
    CUDA_CHECK(cudaMalloc(&y, 1 << 20));
    matmul_create(&matmul, streams[0]);
    CUDA_CHECK(cudaMemset(x, 0, 1 << 20));
    begin();
    matmul_forward(&matmul, x + 100000, x, x + 50000, NULL, N, K, M);
    CUDA_CHECK(cudaDeviceSynchronize());
    check(&totals, at(0) == 1000 + cpu_ns(fmax(1e-7, cost_gemm(c, N, M, K, sizeof(floatX)))),
          "a matrix product: %zu ns", (size_t)at(0));
    begin();
    attention_forward(x + 100000, y, x, 2, 16, 32, 2, streams[0]);
    CUDA_CHECK(cudaDeviceSynchronize());
    double flash = 4.0 * 2 * 2 * 16 * 16 * 16 / 2 / 1e12 * (sizeof(floatX) == 4 ? 2 : 1);
    check(&totals, at(0) == 1000 + cpu_ns(1e-7 + flash), "flash attention: %zu ns", (size_t)at(0));
    begin();
    kernel_cost(KERNEL_LAYERNORM_BACKWARD, 1000, 8, 1),
        kernel_cost(KERNEL_LAYERNORM_BACKWARD, 1000, 6, 1);
    kernel_cost(KERNEL_RESIDUAL_LAYERNORM, 1000, 8, 1);
    LAUNCH(nothing_kernel, 1, 1, streams[0])(device);
    CUDA_CHECK(cudaDeviceSynchronize());
    check(&totals, at(0) == 1000 + 8100 + 6100 + 8100,
          "layernorms and what is fused with them: %zu ns", (size_t)at(0));
    begin();
    CUDA_CHECK(cudaMemcpyAsync(y, x, 5000, cudaMemcpyDeviceToDevice, streams[0]));
    CUDA_CHECK(cudaMemsetAsync(y, 0, 5000, streams[0]));
    CUDA_CHECK(cudaDeviceSynchronize());
    check(&totals, at(0) == 1000 + 10100 + 5100, "a copy reads and writes, a fill writes");
    begin();
    char bytes[5000];
    CUDA_CHECK(cudaMemcpy(y, bytes, sizeof bytes, cudaMemcpyHostToDevice));
    check(&totals, host() == 1000 + 100 + 10000, "a synchronous copy moves the host on");
    begin();
    char *pinned;
    CUDA_CHECK(cudaMallocHost(&pinned, 5000));
    cpu_clock().cluster.host_bandwidth = 1e9;
    kernel(0, 6000);
    CUDA_CHECK(cudaMemcpyAsync(pinned, y, 5000, cudaMemcpyDeviceToHost, streams[1]));
    CUDA_CHECK(cudaMemcpyAsync(y, pinned, 2000, cudaMemcpyHostToDevice, streams[1]));
    CUDA_CHECK(cudaDeviceSynchronize());
    check(&totals, at(0) == 1000 + 6100 && at(1) == 2000 + 5100 + 2100,
          "copies to the host and back follow each other beside a kernel, at its bandwidth");
    cpu_clock().cluster.host_bandwidth = 0;
    CUDA_CHECK(cudaFreeHost(pinned));
    begin();
    kernel_cost(KERNEL_OPTIMIZER, 100, 1, 1), kernel_cost(KERNEL_CLASSIFIER, 100, 1, 1);
    LAUNCH(nothing_kernel, 1, 1, streams[0])(device);
    CUDA_CHECK(cudaDeviceSynchronize());
    check(&totals, at(0) == 1000 + 3100 + 500,
          "updates and logits move what the cluster's software moves; costs add up");
    CUDA_CHECK(cudaFree(x)), CUDA_CHECK(cudaFree(y));
}

// Runs a graph of kernels and events on three streams. Its times do not depend on the
// order of execution.
static uint64_t graph() {
    cudaEvent_t e[3] = {event(), event(), event()};
    begin();
    for (int i = 0; i < 40; i++) {
        for (int s = 0; s < 3; s++) {
            kernel(s, 100 + (i * 37 + s * 101) % 3000);
            if (i % 3 == 0) kernel(s, 700);
            CUDA_CHECK(cudaEventRecord(e[s], streams[s]));
        }
        CUDA_CHECK(cudaStreamWaitEvent(streams[i % 3], e[(i + 1) % 3], 0));
        if (i % 7 == 0) CUDA_CHECK(cudaEventSynchronize(e[i % 2]));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int s = 0; s < 3; s++) CUDA_CHECK(cudaEventDestroy(e[s]));
    return at(0) * 1000003 + at(1) * 1009 + at(2);
}

static void test_order_and_simulation() {
    uint64_t oldest = graph();
    bool same = true;
    for (unsigned long seed = 1; seed <= 20; seed++) {
        cpu_runtime().stream_order = {true, (uint64_t)seed, 0};
        same = same && graph() == oldest;
    }
    cpu_runtime().stream_order = {false, 0, 0};
    check(&totals, same, "20 random orders of the streams have the same times");
    int touched = 0;
    CUDA_CHECK(cudaMemset(device, 0, sizeof touched));
    cpu_clock_start(&cpu_clock().cluster, true);
    uint64_t simulated = graph();
    void *large = NULL;
    check(&totals, cudaMalloc(&large, 512 << 20) == cudaSuccess && large,
          "a simulated device has memory to give");
    check(&totals, cudaMalloc(&large, (size_t)1 << 30) == cudaErrorMemoryAllocation,
          "but not more than the cluster's");
    cudaGetLastError();
    Cluster *cluster = &cpu_clock().cluster;
    cluster->host_memory = 2 * (double)((size_t)64 << 30);
    char *pinned = NULL;
    check(&totals,
          cudaMallocHost(&pinned, ((size_t)64 << 30) + 1) == cudaErrorMemoryAllocation &&
              cudaMallocHost(&pinned, (size_t)60 << 30) == cudaSuccess && pinned[123] == 0 &&
              cudaFreeHost(pinned) == cudaSuccess,
          "a device's share of the host's memory is there, and takes no room here");
    cluster->host_memory = 0;
    cudaGetLastError();
    cpu_clock_start(&cpu_clock().cluster, false);
    CUDA_CHECK(cudaMemcpy(&touched, device, sizeof touched, cudaMemcpyDeviceToHost));
    check(&totals, simulated == oldest && touched == 0,
          "a simulation has these times too, and runs no kernel");
}

// ----------------------------------------------------------------------------------------
// Communication, under mpirun

// Checks a condition on all ranks; rank 0 reports.
static void check_all(bool ok, const char *what) {
    int mine = ok, all;
    MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    if (!ok)
        fprintf(stderr, "rank %d: %s: streams %zu %zu, host %zu\n", world_rank, what,
                (size_t)at(0), (size_t)at(1), (size_t)host());
    if (world_rank == 0) check(&totals, all, "%d ranks: %s", world_size, what);
}

static void must(ncclResult_t result) {
    if (result == ncclSuccess) return;
    fprintf(stderr, "rank %d: %s\n", world_rank, ncclGetLastError(NULL));
    exit(1);
}

static void test_communication() {
    const Cluster *c = &cpu_clock().cluster;
    ncclUniqueId id;
    ncclComm_t world, pair;
    float *x;
    size_t n = 60000, size = (size_t)world_size, rank = (size_t)world_rank;
    CUDA_CHECK(cudaMalloc(&x, 2 * n * sizeof(float)));
    CUDA_CHECK(cudaMemset(x, 0, 2 * n * sizeof(float)));
    if (world_rank == 0) must(ncclGetUniqueId(&id));
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
    must(ncclCommInitRank(&world, world_size, id, world_rank));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.commName = "pair";
    int ours[2] = {world_rank / 2 * 2, world_rank / 2 * 2 + 1};
    config.ranks = ours, config.count = 2, config.waited = true;
    must(ncclCommSplit(world, world_rank / 2, world_rank, &pair, &config));
    // First uses, which connect.
    for (size_t count : {(size_t)4, n}) {
        must(ncclAllReduce(x, x, count, ncclFloat, ncclSum, pair, streams[0]));
        CUDA_CHECK(cudaDeviceSynchronize());
        must(ncclAllReduce(x, x, count, ncclFloat, ncclSum, world, streams[0]));
        must(ncclReduceScatter(x, x + n, count / size, ncclFloat, ncclSum, world, streams[0]));
        must(ncclAllGather(x, x + n, count / size, ncclFloat, world, streams[0]));
        CUDA_CHECK(cudaDeviceSynchronize());
    }
    int peer = world_rank ^ 1, next = (world_rank + 2) % world_size;
    int previous = (world_rank + world_size - 2) % world_size;
    must(ncclGroupStart());
    for (int to : {peer, next}) must(ncclSend(x, 1, ncclFloat, to, world, streams[0]));
    for (int from : {peer, previous}) must(ncclRecv(x + n, 1, ncclFloat, from, world, streams[0]));
    must(ncclGroupEnd());
    CUDA_CHECK(cudaDeviceSynchronize());
    // Rank r is ready when its kernel has ended and it has enqueued the collective, at 2 us.
    uint64_t all_ready = 1000 + 10000 * size;
    Placement place = world->clock.place;
    check_all(place.ranks == size && place.nodes == size / 2 && place.per_node == 2,
              "2 ranks sit in each node");
    for (size_t count : {(size_t)4, n}) {
        double bytes = (double)(count * sizeof(float));
        begin();
        kernel(0, 10000 * (double)(rank + 1) - 100);
        must(ncclAllReduce(x, x, count, ncclFloat, ncclSum, world, streams[0]));
        CUDA_CHECK(cudaDeviceSynchronize());
        check_all(
            at(0) == all_ready + cpu_ns(cost_collective(c, COLLECTIVE_ALL_REDUCE, bytes, place)),
            "an all-reduce begins when the last rank is ready, and all end at the same time");
        begin();
        kernel(0, 10000 * (double)(rank + 1) - 100);
        must(ncclReduceScatter(x, x + n, count / size, ncclFloat, ncclSum, world, streams[0]));
        CUDA_CHECK(cudaDeviceSynchronize());
        check_all(at(0) == all_ready + cpu_ns(cost_collective(c, COLLECTIVE_REDUCE_SCATTER, bytes,
                                                              place)),
                  "so does a reduce-scatter");
        begin();
        kernel(0, 10000 * (double)(rank + 1) - 100);
        must(ncclAllGather(x, x + n, count / size, ncclFloat, world, streams[0]));
        CUDA_CHECK(cudaDeviceSynchronize());
        check_all(
            at(0) == all_ready + cpu_ns(cost_collective(c, COLLECTIVE_ALL_GATHER, bytes, place)),
            "so does an all-gather");
    }
    // In a node: 3 us and 1 ns a byte. Even ranks are late, and send.
    for (int late_sender = 0; late_sender < 2; late_sender++) {
        bool sends = rank % 2 == 0;
        begin();
        if (sends == (late_sender != 0)) kernel(0, 49900);
        if (sends) must(ncclSend(x, 1000, ncclFloat, peer, world, streams[0]));
        else must(ncclRecv(x, 1000, ncclFloat, peer, world, streams[0]));
        CUDA_CHECK(cudaDeviceSynchronize());
        check_all(at(0) == 51000 + 3000 + 4000, late_sender ? "a receive waits for its sender"
                                                           : "a send waits for its receive");
    }
    // Across nodes both of a node's ranks send at once, each by a NIC of its own: 7 us and 2 ns a
    // byte.
    if (world_size > 2) {
        begin();
        if (rank < 2) kernel(0, 9900);
        must(ncclGroupStart());
        must(ncclSend(x, 1000, ncclFloat, next, world, streams[0]));
        must(ncclRecv(x + n, 1000, ncclFloat, previous, world, streams[0]));
        must(ncclGroupEnd());
        CUDA_CHECK(cudaDeviceSynchronize());
        check_all(at(0) == 11000 + 7000 + 8000, "messages across nodes, both ways at once");
        // Two islands of a node each: 20 us, and 4 ns a byte of all that both ranks send.
        cpu_clock().cluster.gpus_per_island = 2, cpu_clock().cluster.island_bandwidth = 2.5e8;
        cpu_clock().cluster.island_latency = 2e-5;
        begin();
        if (rank < 2) must(ncclSend(x, 1000, ncclFloat, (int)rank + 2, world, streams[0]));
        else must(ncclRecv(x, 1000, ncclFloat, (int)rank - 2, world, streams[0]));
        CUDA_CHECK(cudaDeviceSynchronize());
        check_all(at(0) == 1000 + 20000 + 32000,
                  "messages between islands share the link between them");
        cpu_clock().cluster.gpus_per_island = cpu_clock().cluster.island_bandwidth = 0;
        cpu_clock().cluster.island_latency = 0;
        // First and last stage, of one rank each: no other rank uses the only NIC of the node.
        ncclComm_t ends;
        cpu_clock().cluster.nics_per_node = 1;
        int both[2] = {0, world_size - 1};
        config.commName = "ends", config.ranks = both, config.groups = 1, config.waited = false;
        bool end = rank == 0 || rank == size - 1;
        must(ncclCommSplit(world, end ? 0 : NCCL_SPLIT_NOCOLOR, world_rank, &ends, &config));
        for (int turn = 0; turn < 2; turn++) {  // the first connects
            begin();
            if (end) must(ncclAllReduce(x, x, 1000, ncclFloat, ncclSum, ends, streams[0]));
            CUDA_CHECK(cudaDeviceSynchronize());
        }
        check_all(!end || at(0) == 1000 + 10000 + 4000, "one group across nodes has all of a NIC");
        if (end) must(ncclCommDestroy(ends));
        cpu_clock().cluster.nics_per_node = 2;
    }
    // Beside an all-reduce of the pair, of 3 + 120 us, a kernel of 60 us becomes half as long
    // again: 30 us more.
    cudaEvent_t go = event(), done = event();
    double sum =
        cost_collective(c, COLLECTIVE_ALL_REDUCE, (double)(n * sizeof(float)), pair->clock.place);
    for (int longer = 0; longer < 2; longer++) {
        double work = longer ? 500e3 : 60e3;
        begin();
        CUDA_CHECK(cudaEventRecord(go, streams[0]));
        CUDA_CHECK(cudaStreamWaitEvent(streams[1], go, 0));
        must(ncclAllReduce(x, x, n, ncclFloat, ncclSum, pair, streams[1]));
        CUDA_CHECK(cudaEventRecord(done, streams[1]));
        kernel(0, work - 100);
        CUDA_CHECK(cudaStreamWaitEvent(streams[0], done, 0));
        CUDA_CHECK(cudaDeviceSynchronize());
        uint64_t ends = 1000 + cpu_ns(sum), both = longer ? cpu_ns(sum) : 2000 + 60000 - 1000;
        uint64_t slowed = 2000 + (uint64_t)work + (uint64_t)llround(0.5 * (double)both);
        check_all(at(0) == std::max(ends, slowed),
                  longer ? "a kernel that outlasts a collective beside it is slower"
                         : "a kernel beside a longer collective waits for its end");
    }
    // A kernel overlaps three collectives in a row. Without slow-down it would end at 14 us.
    begin();
    for (int i = 0; i < 3; i++) must(ncclAllReduce(x, x, n, ncclFloat, ncclSum, pair, streams[1]));
    CUDA_CHECK(cudaEventRecord(done, streams[1]));
    kernel(0, 9900);
    CUDA_CHECK(cudaStreamWaitEvent(streams[0], done, 0));
    CUDA_CHECK(cudaDeviceSynchronize());
    check_all(
        at(0) == 1000 + 3 * cpu_ns(sum) && streams[0]->times.spent[TIME_TENSOR] == at(0) - 14000,
        "what a kernel leaves of three collectives in a row is communication, and none of it "
        "idle");
    // A collective from 2 us on, beside a kernel from 1 to 4 us and a wait for another stream's
    // until 503 us.
    begin();
    kernel(0, 2900);
    must(ncclAllReduce(x, x, n, ncclFloat, ncclSum, pair, streams[1]));
    CUDA_CHECK(cudaEventRecord(done, streams[1]));
    kernel(2, 499900);
    CUDA_CHECK(cudaEventRecord(go, streams[2]));
    CUDA_CHECK(cudaStreamWaitEvent(streams[0], go, 0));
    kernel(0, 9900);
    CUDA_CHECK(cudaStreamWaitEvent(streams[0], done, 0));
    CUDA_CHECK(cudaDeviceSynchronize());
    check_all(at(0) == 503000 + 10000 + 1000,
              "what waits beside a collective is not slower: 2 us of work are");
    // Software that does not overlap: the kernel begins when the collective has ended.
    cpu_clock().cluster.tensor_overlap = false;
    begin();
    kernel(0, 9900);
    CUDA_CHECK(cudaEventRecord(go, streams[0]));
    CUDA_CHECK(cudaStreamWaitEvent(streams[1], go, 0));
    must(ncclAllReduce(x, x, n, ncclFloat, ncclSum, pair, streams[1]));
    kernel(0, 9900);
    CUDA_CHECK(cudaDeviceSynchronize());
    check_all(at(0) == 11000 + cpu_ns(sum) + 10000,
              "without overlap a kernel waits for the collective before it");
    cpu_clock().cluster.tensor_overlap = true;
    must(ncclCommDestroy(pair));
    must(ncclCommDestroy(world));
}

int main(int argc, char **argv) {
    int provided;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    Cluster cluster = round_cluster();
    cpu_clock_start(&cluster, false);
    for (int i = 0; i < 3; i++)
        CUDA_CHECK(cudaStreamCreateWithPriority(&streams[i], cudaStreamNonBlocking, 0));
    CUDA_CHECK(cudaMalloc(&device, sizeof *device));
    if (world_size == 1) {
        test_streams();
        test_events();
        test_costs();
        test_order_and_simulation();
    } else {
        test_communication();
    }
    MPI_Finalize();
    return world_rank == 0 ? check_summary(&totals) : 0;
}
