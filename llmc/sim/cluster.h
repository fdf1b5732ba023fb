// cluster.h: the description of a cluster and of the software that trains on it, read from
// a JSON file.
//
// defines: AttentionLaw, Network, Cluster, CLUSTER_FIELDS, cluster_read, cluster_parse,
//          cluster_island, cluster_network, cluster_over
//
// The file is an object with "name", "hardware" and "software". Each constant in them is an
// object with a "value" and a "source", the origin of the value as text. Units are SI:
// seconds, bytes, bytes a second, FLOP/s. If nodes have unlike networks, "hardware" has
// InfiniBand's constants, and "roce" and "ethernet" those in which these two differ.
#ifndef LLMC_SIM_CLUSTER_H
#define LLMC_SIM_CLUSTER_H

#include "llmc/host/json.h"

#include <stddef.h>

#define CLUSTER_FILE_MAX ((size_t)1 << 20)  // bytes

// Flash: one fused kernel. Unfused: two batched GEMMs, and between them a softmax over (B,
// NH, T, T).
typedef enum { ATTENTION_FLASH, ATTENTION_UNFUSED } AttentionLaw;

// The network of a node. Most clusters have one network: the first here, whatever its name.
typedef enum { NETWORK_INFINIBAND, NETWORK_ROCE, NETWORK_ETHERNET, NETWORKS } Network;
enum { NETWORK_CONSTANTS = 8 };

// Rates of unfused attention are for heads of 48, 80, 128 and 192 channels.
enum { ATTENTION_SIZES = 4 };

typedef struct {
    char name[64];
    // the device
    double peak_bf16, peak_fp32;  // dense FLOP/s
    double sms;  // multiprocessors: output tiles of a GEMM that run at a time
    double hbm_bandwidth, memory,
        reserve;                        // bytes/s, bytes, bytes of libraries and the driver
    double launch_host, launch_device;  // s of the host for a launch; shortest kernel, s
    // s; share of the peak that one GEMM of full waves reaches
    double gemm_start, gemm_efficiency;
    double gemm_wave, gemm_depth;  // lost share of a part-filled wave; K added to each tile
    double gemm_sustained;         // rate in long runs over the rate of a single GEMM
    double gemm_step, attention_unaligned;  // K is a multiple of this, or of half; FLOP/s
                                            // if 8 divides no head
    double attention_qk[ATTENTION_SIZES],
        attention_pv[ATTENTION_SIZES];           // FLOP/s of the unfused GEMMs
    double flash_forward[2], flash_backward[2];  // FLOP/s at heads of up to 64, and of more
    double elementwise_efficiency, layernorm_forward_efficiency;  // shares of hbm_bandwidth
    double layernorm_backward_efficiency, softmax_efficiency, optimizer_efficiency;
    double overlap_slowdown;  // of kernels while the same device communicates, >= 1
    // the node
    double gpus_per_node;
    double host_bandwidth;  // of one device to its host and back, with pinned memory; 0:
                            // unknown, and a small copy is as fast as one to a NIC
    // Bus bandwidth of collectives in a node; s; s for each rank passed.
    double host_memory;     // bytes of a node, 0: unknown
    double node_bandwidth, node_base, node_hop;
    // bytes of each rank in a ring's turn; s of an empty last turn
    double node_turn, node_turn_cost;
    double node_group;  // a group of n lacks this times 1/n^2 - 1/64 of it: it is for 8
    double small_latency, small_bandwidth;  // low-latency protocol: shares of the latency
                                            // and the bandwidth here
    double node_p2p_bandwidth, node_p2p_latency;  // one message from rank to rank
    // between nodes, from nics_per_node to nic_latency as in Cluster.network
    double nics_per_node;
    double nic_collective_bandwidth;  // of collectives across nodes, for each NIC of a node
    double nic_alone_bandwidth, nic_alone_start;  // if compute waits for each: the same (0:
                                                  // as above); bytes for half
    // s of a collective over 2 nodes; more for each doubling.
    double net_base, net_doubling;
    double nic_bandwidth, nic_latency;  // one message from rank to rank
    // islands of nodes, joined by one slower link; 0: one island
    double gpus_per_island, island_bandwidth, island_latency;
    // unlike nodes: the first have InfiniBand, the next RoCE, all others Ethernet alone,
    // which joins them
    double infiniband_nodes, roce_nodes;
    double network[NETWORKS][NETWORK_CONSTANTS];  // instead of the constants that are
                                                  // tagged so; all 0: one network
    // the software
    int attention;      // AttentionLaw
    bool dropout;       // moves masks; the trainers' own dropout kernels count themselves
    bool data_overlap;  // communication overlaps the last backward
    // it overlaps weight gradients; it overlaps everything
    bool tensor_overlap, pipeline_overlap;
    bool gather_early;    // a gather of inputs anew begins with its half of the backward
    bool scatter_gather;  // a tensor rank sends 1/t of a message to the next stage
    bool recompute_end;   // a recomputed layer computes its last GEMM and sum too
    bool attention_recompute;  // backward computes attention again
    bool fused_forward;        // one kernel for a residual and the next layernorm
    bool fused_backward;  // one kernel for gradients of a layernorm, a residual and a bias
    double optimizer_bytes;   // moved for each parameter of the rank in an update
    double gradient_bytes;    // size of one gradient in the sum over data ranks
    double accumulate_bytes;  // moved to add a gradient to the sum of earlier micro-batches
    double classifier_bytes;  // moved for each logit, forward and backward together
    // s during which the device waits for the host: a message, a step
    double host_transfer, host_step;
    // Least s of a layer's forward and backward: the host's work for them.
    double host_layer;
} Cluster;

// Tags of a constant. A file may leave out an optional one, which is 0 or false then.
enum { CLUSTER_SOFTWARE = 1, CLUSTER_OPTIONAL = 2, CLUSTER_NETWORK = 4 };

// Ranges are wide enough for any device, and so narrow that no time becomes infinite.
#define CONSTANT(key, type, min, max, tags, value) \
    { #key, type, offsetof(Cluster, key), NULL, min, max, tags, value, NULL }
#define AMOUNT(key, tags) CONSTANT(key, FIELD_REAL, 1, 1e18, tags, NULL)
#define COST(key, tags) CONSTANT(key, FIELD_REAL, 0, 1e15, tags, NULL)
#define SHARE(key, tags) CONSTANT(key, FIELD_REAL, 1e-6, 1, tags, NULL)
#define COUNT(key, tags) CONSTANT(key, FIELD_WHOLE, 1, 1048576, tags, NULL)
#define SWITCH(key, tags) \
    CONSTANT(key, FIELD_SWITCH, 0, 1, CLUSTER_SOFTWARE | tags, "false|true")
#define RATE(key, element) \
    { key, FIELD_REAL, offsetof(Cluster, element), NULL, 1, 1e18, 0, NULL, NULL }

// In the order of the struct.
static const Field CLUSTER_FIELDS[] = {
    AMOUNT(peak_bf16, 0),
    AMOUNT(peak_fp32, 0),
    COUNT(sms, 0),
    AMOUNT(hbm_bandwidth, 0),
    AMOUNT(memory, 0),
    COST(reserve, 0),
    COST(launch_host, 0),
    COST(launch_device, 0),
    COST(gemm_start, 0),
    SHARE(gemm_efficiency, 0),
    COST(gemm_wave, 0),
    COST(gemm_depth, 0),
    SHARE(gemm_sustained, 0),
    COUNT(gemm_step, CLUSTER_OPTIONAL),
    AMOUNT(attention_unaligned, CLUSTER_OPTIONAL),
    RATE("attention_qk_48", attention_qk[0]),
    RATE("attention_qk_80", attention_qk[1]),
    RATE("attention_qk_128", attention_qk[2]),
    RATE("attention_qk_192", attention_qk[3]),
    RATE("attention_pv_48", attention_pv[0]),
    RATE("attention_pv_80", attention_pv[1]),
    RATE("attention_pv_128", attention_pv[2]),
    RATE("attention_pv_192", attention_pv[3]),
    RATE("flash_forward_64", flash_forward[0]),
    RATE("flash_forward_128", flash_forward[1]),
    RATE("flash_backward_64", flash_backward[0]),
    RATE("flash_backward_128", flash_backward[1]),
    SHARE(elementwise_efficiency, 0),
    SHARE(layernorm_forward_efficiency, 0),
    SHARE(layernorm_backward_efficiency, 0),
    SHARE(softmax_efficiency, 0),
    SHARE(optimizer_efficiency, 0),
    CONSTANT(overlap_slowdown, FIELD_REAL, 1, 10, 0, NULL),
    COUNT(gpus_per_node, 0),
    AMOUNT(host_bandwidth, CLUSTER_OPTIONAL),
    AMOUNT(host_memory, CLUSTER_OPTIONAL),
    AMOUNT(node_bandwidth, 0),
    COST(node_base, 0),
    COST(node_hop, 0),
    COST(node_turn, CLUSTER_OPTIONAL),
    COST(node_turn_cost, CLUSTER_OPTIONAL),
    SHARE(node_group, CLUSTER_OPTIONAL),
    SHARE(small_latency, 0),
    SHARE(small_bandwidth, 0),
    AMOUNT(node_p2p_bandwidth, 0),
    COST(node_p2p_latency, 0),
    COUNT(nics_per_node, CLUSTER_NETWORK),
    AMOUNT(nic_collective_bandwidth, CLUSTER_NETWORK),
    AMOUNT(nic_alone_bandwidth, CLUSTER_NETWORK | CLUSTER_OPTIONAL),
    COST(nic_alone_start, CLUSTER_NETWORK | CLUSTER_OPTIONAL),
    COST(net_base, CLUSTER_NETWORK),
    COST(net_doubling, CLUSTER_NETWORK),
    AMOUNT(nic_bandwidth, CLUSTER_NETWORK),
    COST(nic_latency, CLUSTER_NETWORK),
    COUNT(gpus_per_island, CLUSTER_OPTIONAL),
    AMOUNT(island_bandwidth, CLUSTER_OPTIONAL),
    COST(island_latency, CLUSTER_OPTIONAL),
    COUNT(infiniband_nodes, CLUSTER_OPTIONAL),
    COUNT(roce_nodes, CLUSTER_OPTIONAL),
    CONSTANT(attention, FIELD_CHOICE, 0, 0, CLUSTER_SOFTWARE, "flash|unfused"),
    SWITCH(dropout, 0),
    SWITCH(data_overlap, 0),
    SWITCH(tensor_overlap, 0),
    SWITCH(pipeline_overlap, 0),
    SWITCH(gather_early, CLUSTER_OPTIONAL),
    SWITCH(scatter_gather, 0),
    SWITCH(recompute_end, 0),
    SWITCH(attention_recompute, CLUSTER_OPTIONAL),
    SWITCH(fused_forward, CLUSTER_OPTIONAL),
    SWITCH(fused_backward, CLUSTER_OPTIONAL),
    COST(optimizer_bytes, CLUSTER_SOFTWARE),
    AMOUNT(gradient_bytes, CLUSTER_SOFTWARE),
    COST(accumulate_bytes, CLUSTER_SOFTWARE),
    COST(classifier_bytes, CLUSTER_SOFTWARE),
    COST(host_transfer, CLUSTER_SOFTWARE),
    COST(host_step, CLUSTER_SOFTWARE),
    COST(host_layer, CLUSTER_SOFTWARE | CLUSTER_OPTIONAL),
};

#undef CONSTANT
#undef AMOUNT
#undef COST
#undef SHARE
#undef COUNT
#undef SWITCH
#undef RATE

enum { CLUSTER_FIELD_COUNT = sizeof CLUSTER_FIELDS / sizeof CLUSTER_FIELDS[0] };

// Reads one constant out of its section. Refuses members other than "value" and "source".
static inline bool cluster_constant(Cluster *c, const Field *f, const cJSON *section,
                                    const char *file, Error *err) {
    const cJSON *constant = cJSON_GetObjectItemCaseSensitive(section, f->name), *member;
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(constant, "value");
    const cJSON *source = cJSON_GetObjectItemCaseSensitive(constant, "source");
    char wanted[128];
    if (!constant && (f->tags & CLUSTER_OPTIONAL)) return true;
    if (!constant) return error_set(err, "%s has no \"%s\"", file, f->name);
    if (!cJSON_IsObject(constant))
        return error_set(err, "%s: \"%s\" must be an object with \"value\" and \"source\"",
                         file, f->name);
    if (!value) return error_set(err, "%s: \"%s\" has no \"value\"", file, f->name);
    if (!cJSON_IsString(source) || !source->valuestring[0])
        return error_set(
            err, "%s: \"%s\" has no \"source\": give the origin of the value as text", file,
            f->name);
    cJSON_ArrayForEach(member, constant) {
        if (member != value && member != source)
            return error_set(err, "%s: \"%s\" has an unknown member \"%s\"", file, f->name,
                             member->string);
    }
    // Here a choice is never its position.
    bool named = f->type != FIELD_CHOICE || cJSON_IsString(value);
    if (named && json_set_field(c, f, value)) return true;
    field_wanted(f, wanted, sizeof wanted);
    return error_set(err, "%s: \"%s\" must be %s", file, f->name, wanted);
}

// Reads all constants of a section. A network's may lack any. Refuses constants that do not
// belong there.
static inline bool cluster_section(Cluster *c, const cJSON *root, const char *name,
                                   const char *file, Error *err) {
    const FieldTable table = {CLUSTER_FIELDS, CLUSTER_FIELD_COUNT, c};
    const bool software = strcmp(name, "software") == 0;
    const bool hardware = strcmp(name, "hardware") == 0;
    const unsigned asked = software || hardware ? CLUSTER_SOFTWARE : CLUSTER_NETWORK;
    const unsigned of = hardware ? 0 : asked;
    const cJSON *section = cJSON_GetObjectItemCaseSensitive(root, name), *child;
    void *object;
    if (!cJSON_IsObject(section))
        return error_set(err, "%s has no object \"%s\"", file, name);
    cJSON_ArrayForEach(child, section) {
        const Field *f = fields_find(&table, 1, child->string, &object);
        if (!f || (f->tags & asked) != of)
            return error_set(err, "%s: \"%s\" has an unknown constant \"%s\"", file, name,
                             child->string);
    }
    for (size_t i = 0; i < CLUSTER_FIELD_COUNT; i++) {
        Field f = CLUSTER_FIELDS[i];
        if (of == CLUSTER_NETWORK) f.tags |= CLUSTER_OPTIONAL;
        if ((f.tags & asked) == of && !cluster_constant(c, &f, section, file, err))
            return false;
    }
    return true;
}

// Returns the cluster as groups and messages over a network see it.
static inline Cluster cluster_over(const Cluster *c, Network network) {
    Cluster there = *c;
    if (network != NETWORK_INFINIBAND)
        memcpy((char *)&there + offsetof(Cluster, nics_per_node), c->network[network],
               sizeof c->network[network]);
    return there;
}

// Reads the networks of unlike nodes, and refuses nodes without theirs.
static inline bool cluster_networks(Cluster *c, const cJSON *root, const char *file,
                                    Error *err) {
    static const char *const names[NETWORKS] = {"", "roce", "ethernet"};
    for (int k = NETWORK_ROCE; k < NETWORKS; k++) {
        Cluster there = *c;
        // It has its own, or those of other collectives.
        there.nic_alone_bandwidth = there.nic_alone_start = 0;
        if (!cJSON_GetObjectItemCaseSensitive(root, names[k])) continue;
        if (!cluster_section(&there, root, names[k], file, err)) return false;
        memcpy(c->network[k], (char *)&there + offsetof(Cluster, nics_per_node),
               sizeof c->network[k]);
    }
    bool joined = c->network[NETWORK_ETHERNET][0] > 0;
    bool roce = c->network[NETWORK_ROCE][0] > 0;
    if (!joined && (roce || c->infiniband_nodes + c->roce_nodes > 0))
        return error_set(
            err, "%s: nodes of unlike networks need \"ethernet\", which joins them", file);
    return roce || c->roce_nodes == 0 ||
           error_set(err, "%s: \"roce_nodes\" need \"roce\", their network", file);
}

// Fills *c from a parsed file. Returns false, with an error message that names file and
// key, if a constant is missing, unknown or out of range.
static inline bool cluster_parse(Cluster *c, const cJSON *root, const char *file,
                                 Error *err) {
    static const char *const sections[] = {"hardware", "software", "roce", "ethernet"};
    const cJSON *name = cJSON_GetObjectItemCaseSensitive(root, "name"), *child;
    memset(c, 0, sizeof *c);
    bool named = cJSON_IsString(name) && name->valuestring[0] &&
                 strlen(name->valuestring) < sizeof c->name;
    for (const char *at = named ? name->valuestring : ""; *at; at++)
        named &= *at >= ' ' && *at < 127;
    if (!named)
        return error_set(err, "%s: \"name\" must be 1 to %zu ASCII characters", file,
                         sizeof c->name - 1);
    cJSON_ArrayForEach(child, root) {
        bool known = child == name;
        for (int i = 0; i < 4; i++) known |= strcmp(child->string, sections[i]) == 0;
        if (!known)
            return error_set(err, "%s has an unknown member \"%s\"", file, child->string);
    }
    strcpy(c->name, name->valuestring);
    if (!cluster_section(c, root, "hardware", file, err) ||
        !cluster_section(c, root, "software", file, err))
        return false;
    if (!cluster_networks(c, root, file, err)) return false;
    bool islands = c->gpus_per_island > 0;
    if (islands != (c->island_bandwidth > 0))
        return error_set(
            err, "%s: \"gpus_per_island\" and \"island_bandwidth\" belong together", file);
    if (islands && fmod(c->gpus_per_island, c->gpus_per_node) != 0)
        return error_set(
            err, "%s: \"gpus_per_island\" must be a multiple of \"gpus_per_node\"", file);
    if (c->reserve >= c->memory)
        return error_set(err, "%s: \"reserve\" must be less than \"memory\"", file);
    return true;
}

// Returns the island of a rank's node.
static inline size_t cluster_island(const Cluster *c, size_t rank) {
    return c->gpus_per_island > 0 ? rank / (size_t)c->gpus_per_island : 0;
}

// Returns the network of a rank's node. cluster_network returns the network between two
// ranks of different nodes.
static inline Network cluster_network_of(const Cluster *c, size_t rank) {
    double node = floor((double)rank / c->gpus_per_node) - c->infiniband_nodes;
    if (node < 0 || c->network[NETWORK_ETHERNET][0] == 0) return NETWORK_INFINIBAND;
    return node < c->roce_nodes ? NETWORK_ROCE : NETWORK_ETHERNET;
}

static inline Network cluster_network(const Cluster *c, size_t a, size_t b) {
    Network network = cluster_network_of(c, a);
    return network == cluster_network_of(c, b) ? network : NETWORK_ETHERNET;
}

static inline bool cluster_read(Cluster *c, const char *path, Error *err) {
    cJSON *root = json_read(path, CLUSTER_FILE_MAX, err);
    bool ok = root && cluster_parse(c, root, path, err);
    cJSON_Delete(root);
    return ok;
}

#endif
