// cost.h: the seconds of one operation on a device of a described cluster.
//
// defines: TimePart, time_part_name, cost_band, cost_memory, cost_gemm, cost_attention,
//          Placement, placement_ranks, placement_among, grid_worst_data_rank,
//          CollectiveKind, cost_collective, cost_send
//
// It knows no models, streams or schedules. Every function is pure: same arguments, same
// bits.
#ifndef LLMC_SIM_COST_H
#define LLMC_SIM_COST_H

#include "llmc/grid.h"
#include "llmc/sim/cluster.h"

// The parts of a device's time. Of communication only the exposed time counts. TENSOR:
// collectives for which compute waits at once, as in tensor parallelism. PIPELINE:
// messages. DATA: all other collectives.
typedef enum {
    TIME_GEMM,
    TIME_ATTENTION,
    TIME_MEMORY,
    TIME_TENSOR,
    TIME_PIPELINE,
    TIME_DATA,
    TIME_OPTIMIZER,
    TIME_HOST,
    TIME_IDLE,
    TIME_PARTS
} TimePart;

static inline const char *time_part_name(TimePart part) {
    static const char *const names[] = {
        "GEMM", "attention", "memory", "tensor", "pipeline", "data", "optimizer", "host",
        "idle"};
    return names[part];
}

// Returns {low, high} for a job of that size, in %. Published steps take longer than
// predicted by `low` at the 10th percentile and by `high` at the 90th. `make scale` prints
// the table, and a test compares.
static inline const double *cost_band(double gpus) {
    static const double bands[][2] = {{-12, 10}, {-1, 8}, {-4, 13}, {-7, 13}, {-2, 24}};
    return bands[(gpus > 8) + (gpus > 64) + (gpus > 256) + (gpus > 1024)];
}

// Returns the seconds of a kernel that moves these bytes at a share of the memory's
// bandwidth, one of the cluster's efficiencies.
static inline double cost_memory(const Cluster *c, double share, double bytes) {
    return bytes <= 0 ? 0 : c->launch_device + bytes / (share * c->hbm_bandwidth);
}

// Returns the waves of tiles over the multiprocessors: between tiles / SMs and that rounded
// up.
static inline double cost_waves(const Cluster *c, double tiles) {
    double even = tiles / c->sms, whole = ceil(even);
    return fmax(even, 1) * (1 - c->gemm_wave) + whole * c->gemm_wave;
}

// Returns the seconds of (M, K) x (K, N), of elements of `width` bytes.
//   compute  Waves of 128 x 128 or 256 x 128 tiles of the output, the faster of the two. An
//            unaligned K costs whole steps. gemm_depth is the cost of a tile besides its K
//            steps: filling the pipeline, writing the result.
//   memory   The three matrices are read or written once, at full bandwidth.
// The time is the larger of the two, after a start-up. Fitted on 7371 (A100) and 8775
// (GH200) timed shapes: dev/scale/README.md, "The laws".
static inline double cost_gemm(const Cluster *c, size_t M, size_t N, size_t K,
                               size_t width) {
    if (M == 0 || N == 0 || K == 0) return 0;
    double m = (double)M, n = (double)N, k = (double)K;
    double peak = width == 4 ? c->peak_fp32 : c->peak_bf16;
    // FLOP/s of one multiprocessor.
    double rate = peak * c->gemm_efficiency * c->gemm_sustained / c->sms;
    double depth = c->gemm_step > 0 && fmod(k, c->gemm_step / 2) != 0
                       ? ceil(k / c->gemm_step) * c->gemm_step
                       : k;
    static const double tile[3][2] = {{128, 128}, {256, 128}, {128, 256}};
    double best = INFINITY;
    for (int i = 0; i < 3; i++) {
        double tiles = ceil(m / tile[i][0]) * ceil(n / tile[i][1]);
        best = fmin(best, cost_waves(c, tiles) * 2 * tile[i][0] * tile[i][1] *
                              (depth + c->gemm_depth) / rate);
    }
    double memory = (double)width * (m * k + k * n + m * n) / c->hbm_bandwidth;
    return c->gemm_start + fmax(best, memory);
}

// Interpolates a rate at head size HS linearly between the given sizes. Heads that 8 does
// not divide have their own.
static inline double attention_rate(const Cluster *c, const double *rates, size_t HS) {
    if (HS % 8 && c->attention_unaligned > 0) return c->attention_unaligned;
    static const double sizes[ATTENTION_SIZES] = {48, 80, 128, 192};
    double head = fmin(fmax((double)HS, sizes[0]), sizes[ATTENTION_SIZES - 1]);
    int i = 0;
    while (head > sizes[i + 1]) i++;
    return rates[i] +
           (rates[i + 1] - rates[i]) * (head - sizes[i]) / (sizes[i + 1] - sizes[i]);
}

// Returns the seconds of causal self-attention of B sequences of T tokens, NH heads (of
// this rank) of HS channels, by the cluster's law. Flash does half the square, which its
// rates count; the backward has 5 GEMMs, the forward 2. Unfused does the whole square, as
// Megatron of 2021: batched GEMMs at measured rates, as reading and writing (T, T) bounds
// them. One has the head as depth: Q K', or in the backward dP. The others sum over T: P V,
// or dV, dQ and dK. A causal softmax in 16 bits reads the lower half and writes the whole
// matrix; backward reads two halves. Dropout behind it reads 2 bytes, writes 2 and moves 1
// of a mask.
static inline double cost_attention(const Cluster *c, bool backward, size_t B, size_t T,
                                    size_t NH, size_t HS) {
    double scores = (double)B * (double)NH * (double)T * (double)T;
    double flops = 2 * scores * (double)HS;
    if (c->attention == ATTENTION_FLASH) {
        double rate = backward ? c->flash_backward[HS > 64] : c->flash_forward[HS > 64];
        return c->launch_device + (backward ? 2.5 : 1) * flops / rate;
    }
    double pv = backward ? 3 : 1;
    double gemms = (1 + pv) * c->launch_device +
                   flops / attention_rate(c, c->attention_qk, HS) +
                   pv * flops / attention_rate(c, c->attention_pv, HS);
    double softmax = cost_memory(c, c->softmax_efficiency, scores * (backward ? 4 : 3));
    return gemms +
           (softmax +
            (c->dropout ? cost_memory(c, c->elementwise_efficiency, scores * 5) : 0));
}

// The places of a group's ranks.
typedef struct {
    size_t ranks, nodes;
    size_t per_node;  // fewest ranks of the group in one of its nodes
    // Most groups like this one in a node, which use its NICs at the same time.
    size_t sharing;
    size_t islands;   // that the group reaches
    size_t crossing;  // groups like this one that reach more than one: they share the link
                      // between islands
    Network network;  // that joins all of its nodes
    bool alone;  // compute waits for each of its collectives, so that none follows another
                 // at once
} Placement;

// Returns the placement of ranks[count], which ascend: rank r of `world` sits in node r /
// gpus_per_node. All ranks of a node form groups of one kind. The node with the fewest
// ranks counts: NCCL has as many rings as it allows.
static inline Placement placement_ranks(const Cluster *c, const size_t *ranks, size_t count,
                                        size_t world) {
    size_t node_size = (size_t)c->gpus_per_node, in_node = 0;
    Placement place = {count, 0, 0, 1, 0, 0, NETWORK_INFINIBAND, false};
    for (size_t i = 0; i < count; i++) {
        size_t node = ranks[i] / node_size, behind = world - node * node_size;
        Network network = cluster_network(c, ranks[0], ranks[i]);
        if (i == 0 || network != place.network)
            place.network = i == 0 ? network : NETWORK_ETHERNET;
        place.islands += i == 0 ||
                         cluster_island(c, ranks[i]) != cluster_island(c, ranks[i - 1]);
        in_node++;
        if (i + 1 < count && ranks[i + 1] / node_size == node) continue;
        place.nodes++;
        if (!place.per_node || in_node < place.per_node) place.per_node = in_node;
        size_t groups = (behind < node_size ? behind : node_size) / in_node;
        if (groups > place.sharing) place.sharing = groups;
        in_node = 0;
    }
    if (place.islands > 1) place.crossing = world / count;
    return place;
}

// Returns the placement of one of `groups` groups: not all ranks of a node need be in one.
// The groups of first and last stages are as many as a stage has ranks.
static inline Placement placement_among(Placement place, size_t groups) {
    if (place.sharing > groups) place.sharing = groups;
    if (place.crossing > groups) place.crossing = groups;
    return place;
}

// Returns the data rank whose layers and messages leave nodes most often, by the slowest
// networks. Of several it takes the one with fewest ranks of a tensor group in a node. If
// groups or stages do not fill nodes, or nodes are unlike, the job waits for it. Two data
// ranks that are a whole node apart sit in the same way on like nodes.
static inline size_t grid_worst_data_rank(const Grid *g, const Cluster *c) {
    size_t worst = 0, most = 0, node = (size_t)c->gpus_per_node;
    size_t unlike = c->network[NETWORK_ETHERNET][0] > 0;
    for (size_t d = 0; d < g->d && (d < node || unlike); d++) {
        size_t count = 0;
        for (size_t p = 0; p < g->p; p++) {
            size_t first = (size_t)grid_rank_at(g, 0, d, p);
            size_t last = (size_t)grid_rank_at(g, g->t - 1, d, p);
            size_t next = (size_t)grid_rank_at(g, 0, d, (p + 1) % g->p);
            size_t apart = last / node - first / node;
            size_t ends[] = {node - first % node, last % node + 1};
            count += node * apart * (1 + (size_t)cluster_network(c, first, last));
            if (next / node != first / node)
                count += node * (1 + (size_t)cluster_network(c, first, next));
            if (apart) count += node - (ends[0] < ends[1] ? ends[0] : ends[1]);
        }
        if (count > most) {
            most = count;
            worst = d;
        }
    }
    return worst;
}

// In the order of llmc/mpi/types.h.
typedef enum {
    COLLECTIVE_ALL_REDUCE,
    COLLECTIVE_REDUCE_SCATTER,
    COLLECTIVE_ALL_GATHER,
    COLLECTIVE_BROADCAST,
    COLLECTIVE_REDUCE
} CollectiveKind;

// Returns the bytes/s of a group's rings. Inside a node it is the switch's bandwidth, which
// small groups do not reach. Across nodes there is one ring for each NIC that the group can
// use. A group that has all ranks of the node uses all its NICs, else its share. A
// collective for which compute waits starts with empty rings, and its first bytes fill
// them.
static inline double collective_bandwidth(const Cluster *c, const Placement *place,
                                          double bytes) {
    double n = (double)place->ranks;
    if (place->nodes <= 1)
        return c->node_bandwidth * (1 - c->node_group * (1 / (n * n) - 1.0 / 64));
    double near = fmax(1, c->nics_per_node * (double)place->per_node / c->gpus_per_node);
    double nics = fmin(near, c->nics_per_node / (double)place->sharing);
    bool alone = place->alone && c->nic_alone_bandwidth > 0;
    double full = bytes > 0 ? bytes / (bytes + c->nic_alone_start) : 1;
    double network = nics *
                     (alone ? full * c->nic_alone_bandwidth : c->nic_collective_bandwidth);
    if (place->islands > 1)
        network = fmin(network, c->island_bandwidth / (double)place->crossing);
    return place->per_node > 1 ? fmin(network, c->node_bandwidth) : network;
}

// Returns the seconds that the last turn of a ring in a node costs more than its bytes. In
// a turn each rank passes on node_turn bytes. Measured times are linear between whole turns
// and jump behind each (A100: each multiple of 24 MiB).
static inline double cost_last_turn(const Cluster *c, double ranks, double bytes) {
    double turns = c->node_turn > 0 ? bytes / (c->node_turn * ranks) : 0;
    return turns > 0.5 ? (ceil(turns) - turns) * c->node_turn_cost : 0;
}

// Returns the seconds of a collective over `bytes`: the whole buffer after an all-gather or
// before a reduce-scatter. A ring moves 2 (n-1)/n of it for an all-reduce, and half as much
// for a reduce-scatter or an all-gather. From or to a root it moves all of it (nccl-tests,
// doc/PERFORMANCE.md: bus bandwidth). Latency inside a node grows with the ranks, across
// nodes with the logarithm of the nodes. The better of two protocols counts: full
// bandwidth, or a share of the latency at a share of the bandwidth.
static inline double cost_collective(const Cluster *c, CollectiveKind kind, double bytes,
                                     Placement place) {
    if (place.ranks <= 1) return 0;
    Cluster there = cluster_over(c, place.network);
    c = &there;
    double n = (double)place.ranks, passes = kind == COLLECTIVE_ALL_REDUCE ? 2 : 1;
    double latency =
        place.nodes <= 1
            ? c->node_base + passes * (n - 1) * c->node_hop
            : passes / 2 * (c->net_base + c->net_doubling * log2((double)place.nodes / 2));
    if (place.islands > 1) latency += passes * c->island_latency;
    if (place.nodes <= 1) latency += passes / 2 * cost_last_turn(c, n, bytes);
    bool rooted = kind == COLLECTIVE_BROADCAST || kind == COLLECTIVE_REDUCE;
    double moved = rooted ? bytes : passes * (n - 1) / n * bytes;
    double transfer = moved / collective_bandwidth(c, &place, bytes);
    return fmin(latency + transfer,
                c->small_latency * latency + transfer / c->small_bandwidth);
}

// Returns the seconds of a message between two ranks. `sharing` ranks, the sender among
// them, send over the same distance at the same time. Ranks of a node share its NICs.
// Between islands all of them share one link.
static inline double cost_send(const Cluster *c, double bytes, size_t from, size_t to,
                               size_t sharing) {
    size_t node = (size_t)c->gpus_per_node, island = (size_t)c->gpus_per_island;
    if (from / node == to / node)
        return c->node_p2p_latency + bytes / c->node_p2p_bandwidth;
    Cluster there = cluster_over(c, cluster_network(c, from, to));
    double share = fmin(1, there.nics_per_node / (double)(sharing < node ? sharing : node));
    double seconds = there.nic_latency + bytes / (share * there.nic_bandwidth);
    if (cluster_island(c, from) == cluster_island(c, to)) return seconds;
    double link = bytes * (double)(sharing < island ? sharing : island) /
                  c->island_bandwidth;
    return c->island_latency + fmax(seconds, link);
}

#endif
