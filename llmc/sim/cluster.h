// cluster.h: the description of a cluster and of the software that trains on it, read from a JSON file.
//
// defines: AttentionLaw, Cluster, cluster_read, cluster_parse, cluster_island
//
// The file is an object with "name", "hardware" and "software"; Cluster below says what each constant is. A constant is
// an object with its "value" and its "source", a text that says where the value comes from. All are in SI units:
// seconds, bytes, bytes a second, floating-point operations a second.
#ifndef LLMC_SIM_CLUSTER_H
#define LLMC_SIM_CLUSTER_H

#include "llmc/host/json.h"

#include <stddef.h>

#define CLUSTER_FILE_MAX ((size_t)1 << 20)  // bytes
#define CLUSTER_NAME_MAX 64

// How attention is computed: one fused kernel, or two batched GEMMs with a softmax over (B, NH, T, T) between them.
typedef enum { ATTENTION_FLASH, ATTENTION_UNFUSED } AttentionLaw;

// Head sizes at which rates of unfused attention are given: 48, 80, 128, 192.
enum { ATTENTION_SIZES = 4 };

typedef struct {
    char name[CLUSTER_NAME_MAX];
    // the device
    double peak_bf16, peak_fp32;                 // dense FLOP/s
    double sms;                                  // multiprocessors: output tiles of a GEMM that run at a time
    double hbm_bandwidth, memory, reserve;       // bytes/s, bytes, bytes that libraries and the driver keep
    double launch_host, launch_device;           // s that the host spends on a launch; that a kernel takes at least
    double gemm_start, gemm_efficiency;          // s; share of the peak that one GEMM of full waves reaches
    double gemm_wave, gemm_depth;                // share of a part-filled wave that is lost; K added to each tile
    double gemm_sustained;                       // rate in long runs over the rate of a single GEMM
    double attention_qk[ATTENTION_SIZES], attention_pv[ATTENTION_SIZES];  // FLOP/s of the unfused GEMMs
    double flash_forward[2], flash_backward[2];  // FLOP/s at heads of up to 64, and of more
    double elementwise_efficiency, layernorm_forward_efficiency;  // shares of hbm_bandwidth
    double layernorm_backward_efficiency, softmax_efficiency, optimizer_efficiency;
    double overlap_slowdown;                     // of kernels while the same device communicates, >= 1
    // the node and the network
    double gpus_per_node, nics_per_node;
    double node_bandwidth, node_base, node_hop;  // bus bandwidth of collectives in a node; s; s for each rank passed
    double node_turn, node_turn_cost;            // bytes of each rank in a ring's turn; s that an empty last turn costs
    double nic_collective_bandwidth;             // of collectives across nodes, for each NIC of a node
    double nic_alone_bandwidth;                  // the same where computing waits for each one; 0: as above
    double net_base, net_doubling;               // s of a collective over 2 nodes; more for each doubling
    double small_latency, small_bandwidth;       // low-latency protocol: shares of the latency and the bandwidth above
    double node_p2p_bandwidth, node_p2p_latency, nic_bandwidth, nic_latency;  // one message from rank to rank
    // islands of nodes that one slower link joins; all three may be left out: then there is one island
    double gpus_per_island, island_bandwidth, island_latency;
    // the software
    AttentionLaw attention;
    bool dropout;                                // it moves masks; the kernels of the trainers' --dropout say their own
    // Communication runs beside the last backward, beside weight gradients, beside everything.
    bool data_overlap, tensor_overlap, pipeline_overlap;
    bool scatter_gather;                         // a tensor rank sends 1/t of what goes to the next stage
    bool recompute_end;                          // a recomputed layer computes its last GEMM and sum too
    // These may be left out, and are false then.
    bool attention_recompute;                    // backward computes attention again
    bool fused_forward;                          // one kernel for a residual and the layernorm behind it
    bool fused_backward;                         // one kernel for a layernorm's, the residual's, a bias's gradient
    double optimizer_bytes;                      // moved for each parameter of the rank in an update
    double gradient_bytes;                       // of one gradient in the sum over data ranks
    double accumulate_bytes;                     // moved to add one gradient to those of earlier micro-batches
    double classifier_bytes;                     // moved for each logit, forward and backward together
    double host_transfer, host_step;             // s of the host that the device waits for: per message, per step
} Cluster;

typedef enum {
    CONSTANT_POSITIVE, CONSTANT_ZERO_OK, CONSTANT_SHARE, CONSTANT_FACTOR, CONSTANT_COUNT, CONSTANT_BOOL, CONSTANT_LAW
} ConstantKind;

typedef struct {
    const char *key;
    size_t offset;
    ConstantKind kind;
    bool software;
} ClusterField;

#define CLUSTER_FIELD(key, kind, software) {#key, offsetof(Cluster, key), kind, software}
#define CLUSTER_ELEMENT(key, array, i, kind) {key, offsetof(Cluster, array) + (i) * sizeof(double), kind, false}

// All constants, in the order of the struct; *count says how many.
static inline const ClusterField *cluster_fields(size_t *count) {
    static const ClusterField fields[] = {
        CLUSTER_FIELD(peak_bf16, CONSTANT_POSITIVE, false),
        CLUSTER_FIELD(peak_fp32, CONSTANT_POSITIVE, false),
        CLUSTER_FIELD(sms, CONSTANT_COUNT, false),
        CLUSTER_FIELD(hbm_bandwidth, CONSTANT_POSITIVE, false),
        CLUSTER_FIELD(memory, CONSTANT_POSITIVE, false),
        CLUSTER_FIELD(reserve, CONSTANT_ZERO_OK, false),
        CLUSTER_FIELD(launch_host, CONSTANT_ZERO_OK, false),
        CLUSTER_FIELD(launch_device, CONSTANT_ZERO_OK, false),
        CLUSTER_FIELD(gemm_start, CONSTANT_ZERO_OK, false),
        CLUSTER_FIELD(gemm_efficiency, CONSTANT_SHARE, false),
        CLUSTER_FIELD(gemm_wave, CONSTANT_ZERO_OK, false),
        CLUSTER_FIELD(gemm_depth, CONSTANT_ZERO_OK, false),
        CLUSTER_FIELD(gemm_sustained, CONSTANT_SHARE, false),
        CLUSTER_ELEMENT("attention_qk_48", attention_qk, 0, CONSTANT_POSITIVE),
        CLUSTER_ELEMENT("attention_qk_80", attention_qk, 1, CONSTANT_POSITIVE),
        CLUSTER_ELEMENT("attention_qk_128", attention_qk, 2, CONSTANT_POSITIVE),
        CLUSTER_ELEMENT("attention_qk_192", attention_qk, 3, CONSTANT_POSITIVE),
        CLUSTER_ELEMENT("attention_pv_48", attention_pv, 0, CONSTANT_POSITIVE),
        CLUSTER_ELEMENT("attention_pv_80", attention_pv, 1, CONSTANT_POSITIVE),
        CLUSTER_ELEMENT("attention_pv_128", attention_pv, 2, CONSTANT_POSITIVE),
        CLUSTER_ELEMENT("attention_pv_192", attention_pv, 3, CONSTANT_POSITIVE),
        CLUSTER_ELEMENT("flash_forward_64", flash_forward, 0, CONSTANT_POSITIVE),
        CLUSTER_ELEMENT("flash_forward_128", flash_forward, 1, CONSTANT_POSITIVE),
        CLUSTER_ELEMENT("flash_backward_64", flash_backward, 0, CONSTANT_POSITIVE),
        CLUSTER_ELEMENT("flash_backward_128", flash_backward, 1, CONSTANT_POSITIVE),
        CLUSTER_FIELD(elementwise_efficiency, CONSTANT_SHARE, false),
        CLUSTER_FIELD(layernorm_forward_efficiency, CONSTANT_SHARE, false),
        CLUSTER_FIELD(layernorm_backward_efficiency, CONSTANT_SHARE, false),
        CLUSTER_FIELD(softmax_efficiency, CONSTANT_SHARE, false),
        CLUSTER_FIELD(optimizer_efficiency, CONSTANT_SHARE, false),
        CLUSTER_FIELD(overlap_slowdown, CONSTANT_FACTOR, false),
        CLUSTER_FIELD(gpus_per_node, CONSTANT_COUNT, false),
        CLUSTER_FIELD(nics_per_node, CONSTANT_COUNT, false),
        CLUSTER_FIELD(node_bandwidth, CONSTANT_POSITIVE, false),
        CLUSTER_FIELD(node_base, CONSTANT_ZERO_OK, false),
        CLUSTER_FIELD(node_hop, CONSTANT_ZERO_OK, false),
        CLUSTER_FIELD(node_turn, CONSTANT_ZERO_OK, false),
        CLUSTER_FIELD(node_turn_cost, CONSTANT_ZERO_OK, false),
        CLUSTER_FIELD(nic_collective_bandwidth, CONSTANT_POSITIVE, false),
        CLUSTER_FIELD(nic_alone_bandwidth, CONSTANT_POSITIVE, false),
        CLUSTER_FIELD(net_base, CONSTANT_ZERO_OK, false),
        CLUSTER_FIELD(net_doubling, CONSTANT_ZERO_OK, false),
        CLUSTER_FIELD(small_latency, CONSTANT_SHARE, false),
        CLUSTER_FIELD(small_bandwidth, CONSTANT_SHARE, false),
        CLUSTER_FIELD(node_p2p_bandwidth, CONSTANT_POSITIVE, false),
        CLUSTER_FIELD(node_p2p_latency, CONSTANT_ZERO_OK, false),
        CLUSTER_FIELD(nic_bandwidth, CONSTANT_POSITIVE, false),
        CLUSTER_FIELD(nic_latency, CONSTANT_ZERO_OK, false),
        CLUSTER_FIELD(gpus_per_island, CONSTANT_COUNT, false),
        CLUSTER_FIELD(island_bandwidth, CONSTANT_POSITIVE, false),
        CLUSTER_FIELD(island_latency, CONSTANT_ZERO_OK, false),
        CLUSTER_FIELD(attention, CONSTANT_LAW, true),
        CLUSTER_FIELD(dropout, CONSTANT_BOOL, true),
        CLUSTER_FIELD(data_overlap, CONSTANT_BOOL, true),
        CLUSTER_FIELD(tensor_overlap, CONSTANT_BOOL, true),
        CLUSTER_FIELD(pipeline_overlap, CONSTANT_BOOL, true),
        CLUSTER_FIELD(scatter_gather, CONSTANT_BOOL, true),
        CLUSTER_FIELD(recompute_end, CONSTANT_BOOL, true),
        CLUSTER_FIELD(attention_recompute, CONSTANT_BOOL, true),
        CLUSTER_FIELD(fused_forward, CONSTANT_BOOL, true),
        CLUSTER_FIELD(fused_backward, CONSTANT_BOOL, true),
        CLUSTER_FIELD(optimizer_bytes, CONSTANT_ZERO_OK, true),
        CLUSTER_FIELD(gradient_bytes, CONSTANT_POSITIVE, true),
        CLUSTER_FIELD(accumulate_bytes, CONSTANT_ZERO_OK, true),
        CLUSTER_FIELD(classifier_bytes, CONSTANT_ZERO_OK, true),
        CLUSTER_FIELD(host_transfer, CONSTANT_ZERO_OK, true),
        CLUSTER_FIELD(host_step, CONSTANT_ZERO_OK, true),
    };
    *count = sizeof fields / sizeof fields[0];
    return fields;
}

// Puts a number where the field stands, or says what would be one.
static inline bool cluster_number(Cluster *c, const ClusterField *field, const cJSON *value, const char *file,
                                  Error *err) {
    double x = cJSON_IsNumber(value) ? value->valuedouble : NAN;
    // Wide enough for any device, and so narrow that no time becomes infinite.
    static const struct { double least, most; const char *wanted; } ranges[] = {
        {1, 1e18, "a number from 1 to 1e18"}, {0, 1e15, "a number from 0 to 1e15"}, {1e-6, 1, "from 0.000001 to 1"},
        {1, 10, "a number from 1 to 10"},     {1, 1048576, "a whole number from 1 to 1048576"}};
    bool ok = x >= ranges[field->kind].least && x <= ranges[field->kind].most;
    if (field->kind == CONSTANT_COUNT) ok = ok && x == floor(x);
    if (!ok) return error_set(err, "%s: \"%s\" must be %s", file, field->key, ranges[field->kind].wanted);
    *(double *)((char *)c + field->offset) = x;
    return true;
}

static inline bool cluster_value(Cluster *c, const ClusterField *field, const cJSON *value, const char *file,
                                 Error *err) {
    char *at = (char *)c + field->offset;
    if (field->kind == CONSTANT_BOOL) {
        if (!cJSON_IsBool(value)) return error_set(err, "%s: \"%s\" must be true or false", file, field->key);
        *(bool *)at = cJSON_IsTrue(value);
        return true;
    }
    if (field->kind == CONSTANT_LAW) {
        const char *law = cJSON_IsString(value) ? value->valuestring : "";
        if (strcmp(law, "flash") != 0 && strcmp(law, "unfused") != 0)
            return error_set(err, "%s: \"%s\" must be \"flash\" or \"unfused\"", file, field->key);
        *(AttentionLaw *)at = strcmp(law, "flash") == 0 ? ATTENTION_FLASH : ATTENTION_UNFUSED;
        return true;
    }
    return cluster_number(c, field, value, file, err);
}

// What a file may leave out is 0 then, or false.
static inline bool cluster_optional(const ClusterField *field) {
    static const char *const parts[] = {"island", "node_turn", "nic_alone", "attention_recompute", "fused_"};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (strstr(field->key, parts[i])) return true;
    return false;
}

// One constant: {"value": ..., "source": "..."} and nothing else.
static inline bool cluster_constant(Cluster *c, const ClusterField *field, const cJSON *object, const char *file,
                                    Error *err) {
    const cJSON *value, *source, *child;
    if (!json_get(object, field->key, &child, file, err)) return false;
    if (!child && cluster_optional(field)) return true;
    if (!child) return error_set(err, "%s has no \"%s\"", file, field->key);
    if (!cJSON_IsObject(child))
        return error_set(err, "%s: \"%s\" must be an object with \"value\" and \"source\"", file, field->key);
    if (!json_get(child, "value", &value, file, err) || !json_get(child, "source", &source, file, err)) return false;
    if (!value) return error_set(err, "%s: \"%s\" has no \"value\"", file, field->key);
    if (!cJSON_IsString(source) || !source->valuestring[0])
        return error_set(err, "%s: \"%s\" has no \"source\", a text that says where the value is from", file,
                         field->key);
    const cJSON *member;
    cJSON_ArrayForEach(member, child) {
        if (member != value && member != source)
            return error_set(err, "%s: \"%s\" has an unknown member \"%s\"", file, field->key, member->string);
    }
    return cluster_value(c, field, value, file, err);
}

// All constants of "hardware" or "software", and no others.
static inline bool cluster_section(Cluster *c, const cJSON *root, bool software, const char *file, Error *err) {
    const char *name = software ? "software" : "hardware";
    const cJSON *object, *child;
    if (!json_get(root, name, &object, file, err)) return false;
    if (!cJSON_IsObject(object)) return error_set(err, "%s has no object \"%s\"", file, name);
    size_t count;
    const ClusterField *fields = cluster_fields(&count);
    cJSON_ArrayForEach(child, object) {
        size_t i = 0;
        while (i < count && (fields[i].software != software || strcmp(fields[i].key, child->string) != 0)) i++;
        if (i == count) return error_set(err, "%s: \"%s\" has an unknown constant \"%s\"", file, name, child->string);
    }
    for (size_t i = 0; i < count; i++)
        if (fields[i].software == software && !cluster_constant(c, &fields[i], object, file, err)) return false;
    return true;
}

// Fills *c from a parsed file. False, with a sentence that names the key and the file, if anything is missing, unknown,
// twice there or out of range.
static inline bool cluster_parse(Cluster *c, const cJSON *root, const char *file, Error *err) {
    memset(c, 0, sizeof *c);
    const cJSON *name, *child;
    if (!json_get(root, "name", &name, file, err)) return false;
    bool named = cJSON_IsString(name) && name->valuestring[0] && strlen(name->valuestring) < sizeof c->name;
    for (const char *at = named ? name->valuestring : ""; *at; at++) named &= (unsigned char)*at >= ' ' && *at != 127;
    if (!named)
        return error_set(err, "%s: \"name\" must be a text of 1 to %zu characters", file, sizeof c->name - 1);
    cJSON_ArrayForEach(child, root) {
        if (child != name && strcmp(child->string, "hardware") != 0 && strcmp(child->string, "software") != 0)
            return error_set(err, "%s has an unknown member \"%s\"", file, child->string);
    }
    strcpy(c->name, name->valuestring);
    if (!cluster_section(c, root, false, file, err) || !cluster_section(c, root, true, file, err)) return false;
    bool islands = c->gpus_per_island > 0;
    if (islands != (c->island_bandwidth > 0))
        return error_set(err, "%s: \"gpus_per_island\" and \"island_bandwidth\" belong together", file);
    if (islands && fmod(c->gpus_per_island, c->gpus_per_node) != 0)
        return error_set(err, "%s: \"gpus_per_island\" must be a multiple of \"gpus_per_node\"", file);
    if (c->reserve >= c->memory) return error_set(err, "%s: \"reserve\" must be less than \"memory\"", file);
    return true;
}

// The island of a rank's node.
static inline size_t cluster_island(const Cluster *c, size_t rank) {
    return c->gpus_per_island > 0 ? rank / (size_t)c->gpus_per_island : 0;
}

static inline bool cluster_read(Cluster *c, const char *path, Error *err) {
    cJSON *root = json_read(path, CLUSTER_FILE_MAX, err);
    bool ok = root && cluster_parse(c, root, path, err);
    cJSON_Delete(root);
    return ok;
}

#endif
