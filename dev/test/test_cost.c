// test_cost.c: tests llmc/sim and dev/scale/step.h. Bad cluster files are refused. Costs agree
// with cases that were worked out by hand. Tests the light simulation of a step, too.
#include <glob.h>
#include <unistd.h>

#include "dev/scale/step.h"
#include "dev/test/check.h"

static bool near(double a, double b) { return fabs(a - b) <= 1e-9 * fabs(b); }

// ----------------------------------------------------------------------------------------
// Cluster files

// Returns a text of all constants with round values. If `key` is one of them, it has `constant`
// instead of its object, or is left out if that is NULL. `tail` follows the last constant of the
// hardware.
static char *cluster_text(const char *key, const char *constant, const char *tail) {
    char *text = (char *)host_alloc(1 << 16, 1);
    size_t n = (size_t)sprintf(text, "{\"name\": \"test\"");
    for (int software = 0; software < 2; software++) {
        n += (size_t)sprintf(text + n, ", \"%s\": {", software ? "software" : "hardware");
        const char *comma = "";
        for (size_t i = 0; i < CLUSTER_FIELD_COUNT; i++) {
            const Field *f = &CLUSTER_FIELDS[i];
            if ((f->tags & CLUSTER_OPTIONAL) && !(key && strcmp(f->name, key) == 0)) continue;
            if (!(f->tags & CLUSTER_SOFTWARE) != !software) continue;
            if (key && !constant && strcmp(f->name, key) == 0) continue;
            const char *value = f->type == FIELD_SWITCH   ? "false"
                                : f->type == FIELD_CHOICE ? "\"flash\""
                                                          : "1";
            if (strcmp(f->name, "reserve") == 0) value = "0";
            n += (size_t)sprintf(text + n, "%s\"%s\": ", comma, f->name);
            if (key && strcmp(f->name, key) == 0) n += (size_t)sprintf(text + n, "%s", constant);
            else n += (size_t)sprintf(text + n, "{\"value\": %s, \"source\": \"test\"}", value);
            comma = ", ";
        }
        n += (size_t)sprintf(text + n, "%s}", software ? "" : tail);
    }
    sprintf(text + n, "}");
    return text;
}

static bool parse(Cluster *c, const char *text, Error *err) {
    cJSON *root = json_parse(text, strlen(text), "f.json", err);
    bool ok = root && cluster_parse(c, root, "f.json", err);
    cJSON_Delete(root);
    return ok;
}

static void refused(Check *c, char *text, const char *sentence) {
    Cluster cluster;
    Error err = {""};
    bool ok = parse(&cluster, text, &err);
    check(c, !ok && strcmp(err.text, sentence) == 0, "%s%s%s", sentence,
          ok ? ": but it was read" : " = ", err.text);
    free(text);
}

#define VALUE(value) "{\"value\": " value ", \"source\": \"x\"}"
#define OF(key, value) "\"" key "\": " VALUE(value)
static const struct {
    const char *key, *constant, *tail, *sentence;  // the first three as cluster_text has them
} REFUSED[] = {
    {"gpus_per_island", VALUE("8"), "",
     "f.json: \"gpus_per_island\" and \"island_bandwidth\" belong together"},
    {"sms", VALUE("1.5"), "", "f.json: \"sms\" must be a whole number from 1 to 1048576"},
    {"hbm_bandwidth", VALUE("0"), "",
     "f.json: \"hbm_bandwidth\" must be a number from 1 to 1e+18"},
    {"hbm_bandwidth", VALUE("1e999"), "",
     "f.json: \"hbm_bandwidth\" must be a number from 1 to 1e+18"},
    {"hbm_bandwidth", VALUE("\"2e12\""), "",
     "f.json: \"hbm_bandwidth\" must be a number from 1 to 1e+18"},
    {"launch_host", VALUE("null"), "",
     "f.json: \"launch_host\" must be a number from 0 to 1e+15"},
    {"gemm_sustained", VALUE("1.1"), "",
     "f.json: \"gemm_sustained\" must be a number from 1e-06 to 1"},
    {"overlap_slowdown", VALUE("0.5"), "",
     "f.json: \"overlap_slowdown\" must be a number from 1 to 10"},
    {"dropout", VALUE("1"), "", "f.json: \"dropout\" must be one of false|true"},
    {"attention", VALUE("\"fast\""), "", "f.json: \"attention\" must be one of flash|unfused"},
    {"attention", VALUE("1"), "", "f.json: \"attention\" must be one of flash|unfused"},
    {"sms", "108", "", "f.json: \"sms\" must be an object with \"value\" and \"source\""},
    {"sms", "{\"source\": \"x\"}", "", "f.json: \"sms\" has no \"value\""},
    {"sms", "{\"value\": 1}", "",
     "f.json: \"sms\" has no \"source\": give the origin of the value as text"},
    {"sms", VALUE("1, \"unit\": \"1\""), "", "f.json: \"sms\" has an unknown member \"unit\""},
    {"sms", VALUE("1, \"value\": 2"), "", "f.json has \"value\" twice: keep one"},
    {NULL, NULL, ", " OF("smss", "1"), "f.json: \"hardware\" has an unknown constant \"smss\""},
    {NULL, NULL, ", " OF("dropout", "true"),
     "f.json: \"hardware\" has an unknown constant \"dropout\""},
    {NULL, NULL, ", " OF("sms", "2"), "f.json has \"sms\" twice: keep one"},
    {"reserve", VALUE("1"), "", "f.json: \"reserve\" must be less than \"memory\""},
    {NULL, NULL, ", " OF("infiniband_nodes", "2"),
     "f.json: nodes of unlike networks need \"ethernet\", which joins them"},
    {NULL, NULL, "}, \"roce\": {" OF("nics_per_node", "2"),
     "f.json: nodes of unlike networks need \"ethernet\", which joins them"},
    {NULL, NULL, ", " OF("roce_nodes", "2") "}, \"ethernet\": {" OF("nics_per_node", "1"),
     "f.json: \"roce_nodes\" need \"roce\", their network"},
    {NULL, NULL, "}, \"ethernet\": {" OF("sms", "1"),
     "f.json: \"ethernet\" has an unknown constant \"sms\""},
    {NULL, NULL, "}, \"ethernet\": {" OF("nic_latency", "-1"),
     "f.json: \"nic_latency\" must be a number from 0 to 1e+15"},
    {NULL, NULL, "}, \"ethernet\": 5, \"roce\": {", "f.json has no object \"ethernet\""},
    {"infiniband_nodes", VALUE("0.5"), "",
     "f.json: \"infiniband_nodes\" must be a whole number from 1 to 1048576"},
};

static void test_files(Check *c) {
    Cluster cluster;
    Error err = {""};
    char *text = cluster_text(NULL, NULL, "");
    check(c, parse(&cluster, text, &err) && cluster.sms == 1 && cluster.attention_pv[3] == 1,
          "a whole file");
    check(c,
          cluster.node_turn == 0 && cluster.nic_alone_bandwidth == 0 &&
              cluster.gpus_per_island == 0 && !cluster.fused_forward && !cluster.fused_backward,
          "what may be left out is 0 or false");
    free(text);
    size_t missing = 0, needed = 0;
    for (size_t i = 0; i < CLUSTER_FIELD_COUNT; i++) {
        char sentence[128];
        if (CLUSTER_FIELDS[i].tags & CLUSTER_OPTIONAL) continue;
        needed++;
        text = cluster_text(CLUSTER_FIELDS[i].name, NULL, "");
        snprintf(sentence, sizeof sentence, "f.json has no \"%s\"", CLUSTER_FIELDS[i].name);
        missing += !parse(&cluster, text, &err) && strcmp(err.text, sentence) == 0;
        free(text);
    }
    check(c, missing == needed && needed > 50,
          "each of %zu constants is missed when it is not there", needed);
    size_t negative = 0, numbers = 0;
    for (size_t i = 0; i < CLUSTER_FIELD_COUNT; i++) {
        if (CLUSTER_FIELDS[i].type == FIELD_SWITCH || CLUSTER_FIELDS[i].type == FIELD_CHOICE)
            continue;
        text = cluster_text(CLUSTER_FIELDS[i].name, "{\"value\": -1, \"source\": \"test\"}", "");
        numbers++;
        negative += !parse(&cluster, text, &err) && strstr(err.text, CLUSTER_FIELDS[i].name) &&
                    strstr(err.text, "f.json");
        free(text);
    }
    check(c, negative == numbers, "each of %zu numbers is refused when it is negative", numbers);
    for (size_t i = 0; i < sizeof REFUSED / sizeof *REFUSED; i++)
        refused(c, cluster_text(REFUSED[i].key, REFUSED[i].constant, REFUSED[i].tail),
                REFUSED[i].sentence);
    refused(c, host_string("{\"hardware\": {}}"),
            "f.json: \"name\" must be 1 to 63 ASCII characters");
    refused(c, host_string("{\"name\": \"x\\u009b31m\"}"),
            "f.json: \"name\" must be 1 to 63 ASCII characters");
    refused(c, host_string("{\"name\": \"x\", \"\\u009b31m\": {}}"),
            "f.json has an unknown member \"??31m\"");
    refused(c, host_string("{\"name\": \"x\"}"), "f.json has no object \"hardware\"");
    refused(c, host_string("{\"name\": \"x\", \"hard\": {}}"),
            "f.json has an unknown member \"hard\"");
    refused(c, host_string("[]"), "f.json is not a JSON object");
    check(c, !cluster_read(&cluster, "no such file", &err) && strstr(err.text, "no such file"),
          "%s", err.text);

    glob_t found;
    size_t read = 0;
    glob("dev/clusters/*.json", 0, NULL, &found);
    for (size_t i = 0; i < found.gl_pathc; i++)
        if (cluster_read(&cluster, found.gl_pathv[i], &err)) read++;
        else check(c, false, "%s", err.text);
    check(c, read >= 4 && read == found.gl_pathc, "%zu of %zu files in dev/clusters are clusters",
          read, (size_t)found.gl_pathc);
    globfree(&found);
}

// ----------------------------------------------------------------------------------------
// Costs

// Round constants, no latencies: 1e12 FLOP/s on 10 multiprocessors, 1e12 bytes/s, 8 GPUs and 8
// NICs a node.
static Cluster simple(void) {
    Cluster c;
    Error err;
    char *text = cluster_text(NULL, NULL, "");
    if (!parse(&c, text, &err)) fprintf(stderr, "%s\n", err.text), exit(1);
    free(text);
    c.peak_bf16 = c.hbm_bandwidth = 1e12, c.peak_fp32 = 1e11, c.sms = 10;
    c.launch_host = c.launch_device = c.gemm_start = c.gemm_wave = c.gemm_depth = 0;
    c.gpus_per_node = c.nics_per_node = 8;
    c.node_bandwidth = 1e10, c.nic_collective_bandwidth = 1e9, c.nic_bandwidth = 1e9,
    c.node_p2p_bandwidth = 4e9;
    c.node_base = c.node_hop = c.net_base = c.net_doubling = c.nic_latency = c.node_p2p_latency = 0;
    c.host_transfer = c.host_step = c.optimizer_bytes = c.accumulate_bytes = c.classifier_bytes = 0;
    c.gradient_bytes = 4;
    for (int i = 0; i < ATTENTION_SIZES; i++)
        c.attention_qk[i] = 1e12 * (i + 1), c.attention_pv[i] = 2e12 * (i + 1);
    c.flash_forward[0] = c.flash_forward[1] = 1e12,
    c.flash_backward[0] = c.flash_backward[1] = 5e11;
    return c;
}

static void test_gemm(Check *c) {
    Cluster x = simple();
    // one tile keeps one of 10 multiprocessors busy: 2 * 128 * 128 * 10000 FLOPs at 1e11
    check(c, near(cost_gemm(&x, 128, 128, 10000, 2), 3.2768e-3), "a GEMM of one tile");
    check(c, near(cost_gemm(&x, 1280, 1280, 10000, 2), 3.2768e-2),
          "100 tiles on 10 multiprocessors");
    check(c, near(cost_gemm(&x, 1280, 1280, 10000, 4), 3.2768e-1), "in fp32, at its own peak");
    check(c, near(cost_gemm(&x, 1281, 1280, 10000, 2), 3.2768e-2 * 1.1),
          "a row more is a row of tiles more");
    x.gemm_wave = 1;
    check(c, near(cost_gemm(&x, 1281, 1280, 10000, 2), 3.2768e-2 * 1.1), "which is a whole wave");
    check(c, near(cost_gemm(&x, 11 * 128, 128, 10000, 2), 3.2768e-3 * 2), "11 tiles are two waves");
    x.gemm_wave = 0.5;
    check(c, near(cost_gemm(&x, 11 * 128, 128, 10000, 2), 3.2768e-3 * 1.55),
          "or what the law says");
    x = simple();
    x.gemm_start = 1, x.gemm_depth = 10000, x.gemm_efficiency = 0.5, x.gemm_sustained = 0.5;
    check(c, near(cost_gemm(&x, 128, 128, 10000, 2), 1 + 3.2768e-3 * 8),
          "start-up, depth, efficiency, clock");
    x = simple();
    x.hbm_bandwidth = 1e9;
    check(c, near(cost_gemm(&x, 1280, 1280, 128, 2), 2e-9 * (2 * 1280 * 128 + 1280 * 1280)),
          "bound by memory");
    check(c, cost_gemm(&x, 0, 128, 128, 2) == 0, "an empty GEMM is none");
    x = simple();
    double aligned = cost_gemm(&x, 1280, 1280, 256, 2);
    x.gemm_step = 128;
    check(c, near(cost_gemm(&x, 1280, 1280, 160, 2), aligned) &&
                 near(cost_gemm(&x, 1280, 1280, 192, 2), aligned * 0.75),
          "a K of 160 costs two steps of 128, one of 192, which 64 divides, no more than itself");
    x = simple();
    bool up = true;
    x.gemm_wave = 0.4;
    for (size_t n = 1; n < 3000; n += 7)
        up = up && cost_gemm(&x, n + 7, 999, 512, 2) >= cost_gemm(&x, n, 999, 512, 2) &&
             cost_gemm(&x, 999, n + 7, 512, 2) >= cost_gemm(&x, 999, n, 512, 2) &&
             cost_gemm(&x, 999, 512, n + 7, 2) > cost_gemm(&x, 999, 512, n, 2);
    check(c, up, "no GEMM is faster than a smaller one");
}

static void test_memory_and_attention(Check *c) {
    Cluster x = simple();
    x.launch_device = 1, x.softmax_efficiency = 0.5, x.elementwise_efficiency = 0.25;
    check(c,
          near(cost_memory(&x, x.elementwise_efficiency, 1e12), 5) &&
              near(cost_memory(&x, x.softmax_efficiency, 1e12), 3) &&
              near(cost_memory(&x, x.optimizer_efficiency, 1e12), 2),
          "bytes at the share of their class");
    check(c, cost_memory(&x, x.layernorm_forward_efficiency, 0) == 0, "no bytes, no kernel");
    x = simple();
    // 2 sequences, 3 heads of 64, T = 1000: 4 * 2 * 3 * 1e6 * 64 / 2 FLOPs, backward 2.5 times
    // that
    check(c, near(cost_attention(&x, false, 2, 1000, 3, 64), 7.68e-4), "flash forward");
    check(c, near(cost_attention(&x, true, 2, 1000, 3, 64), 7.68e-4 * 5), "flash backward");
    // heads of 80: 2 * 6 * 1e6 * 80 FLOPs a GEMM at 2e12 and 4e12; softmax 3 bytes, backward 4,
    // of 6e6 elements
    double gemm = 9.6e8;
    x.attention = ATTENTION_UNFUSED;
    check(c, near(cost_attention(&x, false, 2, 1000, 3, 80), gemm / 2e12 + gemm / 4e12 + 1.8e-5),
          "unfused forward");
    check(c, near(cost_attention(&x, true, 2, 1000, 3, 80), gemm / 2e12 + 3 * gemm / 4e12 + 2.4e-5),
          "unfused backward");
    x.dropout = true;
    check(c, near(cost_attention(&x, false, 2, 1000, 3, 80), gemm / 2e12 + gemm / 4e12 + 4.8e-5),
          "with dropout");
    const double *qk = x.attention_qk;
    check(c, near(attention_rate(&x, qk, 104), 2.5e12) && near(attention_rate(&x, qk, 8), 1e12) &&
                 near(attention_rate(&x, qk, 192), 4e12) && near(attention_rate(&x, qk, 999), 4e12),
          "rates between head sizes lie on a line, beyond them they stay");
    x.dropout = false, x.attention_unaligned = 1e11;
    check(c,
          near(cost_attention(&x, false, 2, 1000, 3, 84), 2 * 1.008e9 / 1e11 + 1.8e-5) &&
              near(cost_attention(&x, false, 2, 1000, 3, 80), gemm / 2e12 + gemm / 4e12 + 1.8e-5),
          "heads that 8 does not divide have a rate of their own, and others theirs");
}

static bool placed(Placement p, size_t ranks, size_t nodes, size_t per_node, size_t sharing) {
    return p.ranks == ranks && p.nodes == nodes && p.per_node == per_node && p.sharing == sharing;
}

static void test_placement(Check *c) {
    Cluster x = simple();
    check(c, placed(placement_stride(&x, 0, 1, 8, 64), 8, 1, 8, 1), "t = 8 fills a node");
    check(c, placed(placement_stride(&x, 8, 1, 4, 64), 4, 1, 4, 2), "t = 4: two groups in a node");
    check(c, placed(placement_stride(&x, 0, 1, 16, 64), 16, 2, 8, 1), "t = 16: all of two nodes");
    check(c, placed(placement_stride(&x, 3, 8, 4, 64), 4, 4, 1, 8),
          "data ranks behind t = 8: 8 groups share the NICs");
    check(c, placed(placement_stride(&x, 1, 2, 32, 64), 32, 8, 4, 2),
          "behind t = 2: half a node, two groups");
    check(c, placed(placement_stride(&x, 0, 1, 4, 4), 4, 1, 4, 1), "a job smaller than a node");
    size_t odd[] = {6, 7, 8, 9, 10, 24};
    check(c, placed(placement_ranks(&x, odd, 6, 64), 6, 3, 1, 8),
          "any list of ranks: the node with one counts");
    Placement ends = placement_stride(&x, 0, 30, 2, 32);
    check(c,
          placed(placement_among(ends, 2), 2, 2, 1, 2) &&
              placed(placement_among(ends, 16), 2, 2, 1, 8),
          "first and last stages of 2 ranks are 2 groups, not as many as a node has ranks");
    x.gpus_per_island = 16;
    ends = placement_stride(&x, 0, 30, 2, 32);
    check(c, ends.crossing == 16 && placement_among(ends, 2).crossing == 2,
          "nor as many as there are pairs");
}

static void test_networks(Check *c) {
    Cluster x;
    Error err = {""};
    // 2 nodes of 8 with InfiniBand, 1 with RoCE at half its rates, all others with one Ethernet
    // card for 8
    char *text = cluster_text(
        NULL, NULL,
        ", " OF("infiniband_nodes", "2") ", " OF("roce_nodes", "1")
        "}, \"roce\": {" OF("nic_collective_bandwidth", "5e8") ", " OF("nic_bandwidth", "5e8")
        "}, \"ethernet\": {" OF("nics_per_node", "1") ", " OF("nic_collective_bandwidth", "2")
        ", " OF("nic_alone_bandwidth", "3") ", " OF("nic_alone_start", "4")
        ", " OF("net_base", "5") ", " OF("net_doubling", "6")
        ", " OF("nic_bandwidth", "7") ", " OF("nic_latency", "8"));
    bool ok = parse(&x, text, &err);
    free(text);
    Cluster over = cluster_over(&x, NETWORK_ETHERNET), roce = cluster_over(&x, NETWORK_ROCE);
    check(c,
          ok && over.nics_per_node == 1 && over.nic_collective_bandwidth == 2 &&
              over.nic_alone_bandwidth == 3 && over.nic_alone_start == 4 && over.net_base == 5 &&
              over.net_doubling == 6 && over.nic_bandwidth == 7 && over.nic_latency == 8 &&
              over.sms == 1 && roce.nic_bandwidth == 5e8 && roce.nic_latency == 1,
          "a network's constants take the place of the hardware's, which it has where it names "
          "none %s",
          err.text);
    Cluster all = simple();
    memcpy(all.network, x.network, sizeof all.network);
    all.infiniband_nodes = 2, all.roce_nodes = 1;
    double *net[] = {all.network[NETWORK_ROCE], all.network[NETWORK_ETHERNET]};
    const double slow[2][NETWORK_CONSTANTS] = {{8, 5e8, 0, 0, 0, 0, 5e8, 0},
                                               {1, 1e8, 0, 0, 0, 0, 1e8, 3}};
    for (int i = 0; i < 2; i++) memcpy(net[i], slow[i], sizeof slow[i]);
    check(c,
          cluster_network(&all, 0, 15) == NETWORK_INFINIBAND &&
              cluster_network(&all, 16, 23) == NETWORK_ROCE &&
              cluster_network(&all, 15, 16) == NETWORK_ETHERNET &&
              cluster_network(&all, 24, 31) == NETWORK_ETHERNET,
          "ranks of like nodes talk by their network, all others by Ethernet");
    Placement here = placement_stride(&all, 0, 8, 2, 32),
              across = placement_stride(&all, 8, 8, 2, 32);
    Placement wide = placement_stride(&all, 0, 8, 4, 32),
              inside = placement_stride(&all, 24, 1, 8, 32);
    check(c, here.network == NETWORK_INFINIBAND && across.network == NETWORK_ETHERNET &&
                 wide.network == NETWORK_ETHERNET,
          "a group takes the network that joins all of its nodes");
    check(c,
          near(cost_collective(&all, COLLECTIVE_ALL_REDUCE, 8e9, here), 8) &&
              near(cost_collective(&all, COLLECTIVE_ALL_REDUCE, 8e9, across), 8e9 / (1e8 / 8)) &&
              near(cost_collective(&all, COLLECTIVE_ALL_REDUCE, 8e10, inside), 14),
          "with InfiniBand, by an Ethernet card that 8 groups share, by NVLink in a node that "
          "has Ethernet");
    check(c,
          near(cost_send(&all, 1e9, 0, 8, 8), 1) &&
              near(cost_send(&all, 1e9, 8, 16, 8), 3 + 80) &&
              near(cost_send(&all, 1e9, 16, 23, 1), 0.25),
          "and so do messages");
    // p = 2, d = 16: stage 0 has the nodes with InfiniBand, stage 1 one with RoCE and one with
    // Ethernet
    StepLayout r = {.ranks = 32, .layers = 5, .C = 1024, .NH = 16, .T = 256, .vocabulary = 128,
                    .global_batch = 32, .micro_batch = 1, .t = 1, .p = 2, .d = 16, .v = 1,
                    .schedule = SCHEDULE_1F1B};
    Grid g = step_grid(&all, &r);
    double sum[2], gather, update;
    for (size_t s = 0; s < 2; s++) step_data(&all, &r, &g, s, &sum[s], &gather, &update);
    check(c,
          near(sum[0] / step_parameters(&r, 0), 1.875 * 4 / 8e9) &&
              near(sum[1] / step_parameters(&r, 1), 1.875 * 4 / 1e8),
          "a stage's gradients take its own network");
    check(c, step_chunk_layers(&r, 0) == 3 && step_chunk_layers(&r, 1) == 2,
          "equal stages of 5 layers");
    double equal = step_parameters(&r, 0);
    strcpy(r.stages, "1,4");
    StepTime time;
    check(c,
          step_chunk_layers(&r, 0) == 1 && step_chunk_layers(&r, 1) == 4 &&
              step_simulate(&all, &r, &time, &err) &&
              near(equal - step_parameters(&r, 0), 2 * (12.0 * 1024 * 1024 + 13.0 * 1024)),
          "stages of unequal length hold so many layers' parameters");
    strcpy(r.stages, "1,3");
    check(c, !step_simulate(&all, &r, &time, &err), "%s", err.text);
}

// Groups of 96 ranks on nodes of 4, 6, 12, 16 and 72 GPUs, and the NICs that each of them has at
// one time.
static void test_shared_nics(Check *c) {
    static const struct {
        double gpus, nics;
        size_t first, stride, count;
        double rings;
        const char *what;
    } cases[] = {
        {4, 4, 0, 1, 8, 4, "nodes of 4, t = 8: all of two nodes"},
        {4, 4, 0, 2, 48, 2, "data ranks behind t = 2: two groups share 4 NICs"},
        {4, 2, 0, 2, 48, 1, "and 2 NICs"},
        {4, 4, 0, 4, 24, 1, "behind t = 4: four groups"},
        {6, 6, 4, 1, 4, 2, "nodes of 6, t = 4: two ranks on either side"},
        {6, 6, 6, 1, 8, 2,
         "t = 8: six ranks in a node and two in the next, which two NICs leave"},
        {6, 6, 0, 4, 24, 1, "data ranks behind t = 4: one or two in a node, and one counts"},
        {6, 3, 0, 2, 48, 1.5, "behind t = 2: two groups share 3 NICs"},
        {12, 12, 8, 1, 8, 4, "nodes of 12, t = 8: four ranks on either side"},
        {12, 8, 0, 4, 24, 2, "data ranks behind t = 4: four groups share 8 NICs"},
        {16, 16, 0, 4, 24, 4, "nodes of 16, behind t = 4: four groups of four ranks"},
        {16, 8, 0, 16, 6, 0.5, "behind t = 16: sixteen groups share 8 NICs"},
        {72, 72, 0, 8, 12, 3,
         "nodes of 72, behind t = 8: nine ranks in one node, three in the next"},
        {72, 8, 0, 8, 12, 1,
         "eight groups share 8 NICs, in the node that is full and in the other"},
        {72, 72, 64, 1, 16, 8, "t = 16: eight ranks on either side"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Cluster x = simple();
        x.gpus_per_node = cases[i].gpus, x.nics_per_node = cases[i].nics, x.node_bandwidth = 1e15;
        Placement place = placement_stride(&x, cases[i].first, cases[i].stride, cases[i].count, 96);
        double rings = collective_bandwidth(&x, &place, 1e9) / x.nic_collective_bandwidth;
        check(c, near(rings, cases[i].rings), "%s: %g NICs", cases[i].what, rings);
    }
}

static void test_collectives(Check *c) {
    Cluster x = simple();
    Placement node = placement_stride(&x, 0, 1, 8, 8), two = placement_stride(&x, 0, 1, 16, 16);
    Placement one_nic = placement_stride(&x, 0, 8, 2, 16),
              alone = placement_stride(&x, 0, 1, 1, 16);
    check(c, near(cost_collective(&x, COLLECTIVE_ALL_REDUCE, 8e10, node), 14),
          "all-reduce in a node: 2 * 7/8");
    check(c,
          near(cost_collective(&x, COLLECTIVE_ALL_GATHER, 8e10, node), 7) &&
              near(cost_collective(&x, COLLECTIVE_REDUCE_SCATTER, 8e10, node), 7),
          "each half of it half");
    check(c, near(cost_collective(&x, COLLECTIVE_BROADCAST, 8e10, node), 8) &&
                 near(cost_collective(&x, COLLECTIVE_REDUCE, 8e10, node), 8),
          "broadcast and reduction");
    check(c, near(cost_collective(&x, COLLECTIVE_ALL_REDUCE, 8e10, two), 18.75),
          "across nodes on 8 rings of 8 NICs");
    check(c, near(cost_collective(&x, COLLECTIVE_ALL_REDUCE, 8e9, one_nic), 8),
          "a rank a node: its own NIC");
    check(c, cost_collective(&x, COLLECTIVE_ALL_REDUCE, 8e9, alone) == 0, "one rank alone");
    Cluster half = x;
    half.nic_collective_bandwidth /= 2;
    check(c, near(cost_collective(&half, COLLECTIVE_ALL_REDUCE, 8e10, two), 37.5) &&
                 near(cost_collective(&half, COLLECTIVE_ALL_REDUCE, 8e10, node), 14),
          "halving the network doubles its time");
    half = x;
    half.node_bandwidth /= 2;
    check(c, near(cost_collective(&half, COLLECTIVE_ALL_REDUCE, 8e10, node), 28),
          "halving the switch doubles its time");
    half.node_bandwidth = 4e9;
    check(c, near(cost_collective(&half, COLLECTIVE_ALL_REDUCE, 8e10, two), 37.5),
          "rings pass through the switch too");
    x.node_base = 1, x.node_hop = 0.5, x.net_base = 2, x.net_doubling = 1;
    Placement eight = placement_stride(&x, 0, 1, 64, 64);
    check(c,
          near(cost_collective(&x, COLLECTIVE_ALL_REDUCE, 0, node), 8) &&
              near(cost_collective(&x, COLLECTIVE_ALL_GATHER, 0, node), 4.5),
          "latency in a node");
    check(c,
          near(cost_collective(&x, COLLECTIVE_ALL_REDUCE, 0, two), 2) &&
              near(cost_collective(&x, COLLECTIVE_ALL_REDUCE, 0, eight), 4),
          "latency across 2 and 8 nodes");
    x.small_latency = 0.25, x.small_bandwidth = 0.5;
    check(c, near(cost_collective(&x, COLLECTIVE_ALL_REDUCE, 0, two), 0.5) &&
                 near(cost_collective(&x, COLLECTIVE_ALL_REDUCE, 8e10, two), 20.75),
          "small messages by the other protocol");
    x = simple();
    x.node_turn = 1e9, x.node_turn_cost = 4;
    check(c, near(cost_collective(&x, COLLECTIVE_ALL_REDUCE, 16e9, node), 2.8) &&
                 near(cost_collective(&x, COLLECTIVE_ALL_REDUCE, 18e9, node), 3.15 + 3) &&
                 near(cost_collective(&x, COLLECTIVE_ALL_GATHER, 18e9, node), 1.575 + 1.5) &&
                 near(cost_collective(&x, COLLECTIVE_ALL_REDUCE, 4e9, node), 0.7),
          "a ring's last turn, a quarter of 8 GB, costs three quarters of an empty one more");
    x = simple();
    two.alone = node.alone = true;
    check(c, near(cost_collective(&x, COLLECTIVE_ALL_REDUCE, 8e10, two), 18.75),
          "collectives for which computing waits, with no rate of their own");
    x.nic_alone_bandwidth = 0.5e9;
    check(c, near(cost_collective(&x, COLLECTIVE_ALL_REDUCE, 8e10, two), 37.5) &&
                 near(cost_collective(&x, COLLECTIVE_ALL_REDUCE, 8e10, node), 14),
          "with one, which is for groups across nodes only");
    two.alone = false;
    check(c, near(cost_collective(&x, COLLECTIVE_ALL_REDUCE, 8e10, two), 18.75),
          "and others keep theirs");
    half = x;
    half.nics_per_node /= 2;
    check(c, near(cost_send(&x, 8e9, 0, 1, 8), 2) && near(cost_send(&x, 8e9, 0, 8, 1), 8) &&
                 near(cost_send(&x, 8e9, 0, 8, 8), 8) && near(cost_send(&half, 8e9, 0, 8, 8), 16),
          "messages in a node, by a NIC, by a NIC for two");
    x.gpus_per_island = 16, x.island_bandwidth = 1e9, x.island_latency = 5;
    Placement wide = placement_stride(&x, 0, 16, 2, 32),
              near_by = placement_stride(&x, 0, 8, 2, 32);
    check(
        c,
        wide.islands == 2 && wide.crossing == 16 && near_by.islands == 1 && near_by.crossing == 0,
        "groups that reach both islands are told from those that do not");
    check(c, near(cost_collective(&x, COLLECTIVE_ALL_REDUCE, 1e9, wide), 10 + 16),
          "16 groups share the islands' link");
    check(c, near(cost_send(&x, 1e9, 0, 16, 16), 5 + 16) && near(cost_send(&x, 8e9, 0, 8, 8), 8),
          "and so do 16 messages");
    x = simple();
    x.nic_latency = 3, x.node_p2p_latency = 1;
    check(c, near(cost_send(&x, 8e9, 0, 1, 8), 3) && near(cost_send(&x, 8e9, 0, 8, 8), 11),
          "and their latency");
}

// ----------------------------------------------------------------------------------------
// Layers and steps

static void test_layers(Check *c) {
    Cluster x = simple();
    LayerShape s = {.B = 2, .T = 1024, .C = 1024, .NH = 16, .t = 1, .vocabulary = 1024,
                    .tensor = placement_stride(&x, 0, 1, 1, 8)};
    OpList o;
    double groups[TIME_PARTS] = {0}, sum = 0;
    layer_operations(&o, &x, &s, false);
    double forward = ops_seconds(&o, groups);
    for (int g = 0; g < TIME_PARTS; g++) sum += groups[g];
    check(c, near(sum, forward) && groups[TIME_TENSOR] == 0,
          "groups sum to the layer, and t = 1 sends nothing");
    double gemms = cost_gemm(&x, 2048, 3072, 1024, 2) + cost_gemm(&x, 2048, 1024, 1024, 2) +
                   cost_gemm(&x, 2048, 4096, 1024, 2) + cost_gemm(&x, 2048, 1024, 4096, 2);
    check(c, near(groups[TIME_GEMM], gemms), "its four GEMMs");
    layer_operations(&o, &x, &s, true);
    double backward = ops_seconds(&o, NULL);
    s.recompute = LAYER_WHOLE, x.recompute_end = true;
    layer_operations(&o, &x, &s, true);
    check(c, near(ops_seconds(&o, NULL), forward + backward), "recomputation is a forward more");
    x.recompute_end = false;
    layer_operations(&o, &x, &s, true);
    double less = cost_gemm(&x, 2048, 1024, 4096, 2) +
                  cost_memory(&x, x.elementwise_efficiency, 6.0 * 2048 * 1024);
    check(c, near(ops_seconds(&o, NULL), forward + backward - less),
          "less its end, where a trainer leaves that out");
    s.recompute = LAYER_ATTENTION;
    layer_operations(&o, &x, &s, true);
    check(c, near(ops_seconds(&o, NULL), backward + cost_attention(&x, false, 2, 1024, 16, 64)),
          "selective recomputation is attention once more");
    x.attention_recompute = true, s.recompute = LAYER_KEEPS;
    layer_operations(&o, &x, &s, true);
    check(c, near(ops_seconds(&o, NULL), backward + cost_attention(&x, false, 2, 1024, 16, 64)),
          "software may do so always");
    s.recompute = LAYER_WHOLE;
    layer_operations(&o, &x, &s, true);
    check(c, near(ops_seconds(&o, NULL), forward + backward - less),
          "but not beside a whole layer");
    x.attention_recompute = false;
    x.fused_backward = true, s.recompute = LAYER_KEEPS;
    layer_operations(&o, &x, &s, true);
    double rows = 2.0 * 2048 * 1024;
    check(c,
          near(ops_seconds(&o, NULL),
               backward - 2 * (cost_memory(&x, x.layernorm_backward_efficiency, rows) +
                               cost_memory(&x, x.elementwise_efficiency, 4 * rows))),
          "a fused backward of layernorm and residual moves half as much");
    x.fused_backward = false, x.fused_forward = true;
    layer_operations(&o, &x, &s, false);
    check(c,
          near(ops_seconds(&o, NULL),
               forward - cost_memory(&x, x.elementwise_efficiency, 3 * rows) -
                   cost_memory(&x, x.layernorm_forward_efficiency, 2 * rows) +
                   cost_memory(&x, x.layernorm_forward_efficiency, 4 * rows)),
          "a fused residual and layernorm reads their sum once less");
    x.fused_forward = false;

    s.t = 8, s.recompute = LAYER_KEEPS, s.tensor = placement_stride(&x, 0, 1, 8, 8);
    double all_reduce = cost_collective(&x, COLLECTIVE_ALL_REDUCE, 2.0 * 2048 * 1024, s.tensor),
           part[2][TIME_PARTS];
    for (int parallel = 0; parallel < 2; parallel++) {
        memset(part[parallel], 0, sizeof part[parallel]);
        s.sequence_parallel = parallel;
        layer_operations(&o, &x, &s, false);
        ops_seconds(&o, part[parallel]);
    }
    check(c, near(part[0][TIME_TENSOR], 2 * all_reduce), "t = 8: two all-reduces in forward");
    check(c, near(part[1][TIME_TENSOR], 2 * all_reduce), "sequence parallelism sends as much");
    check(c,
          part[1][TIME_MEMORY] < part[0][TIME_MEMORY] &&
              near(part[1][TIME_GEMM], part[0][TIME_GEMM]),
          "and cuts memory-bound kernels, not GEMMs");
    memset(part, 0, sizeof part);
    s.sequence_parallel = false;
    layer_operations(&o, &x, &s, true);
    ops_seconds(&o, part[0]);
    x.tensor_overlap = true, x.overlap_slowdown = 1;
    layer_operations(&o, &x, &s, true);
    ops_seconds(&o, part[1]);
    check(c,
          near(part[0][TIME_TENSOR], 2 * all_reduce) &&
              part[1][TIME_TENSOR] < part[0][TIME_TENSOR] &&
              near(part[0][TIME_GEMM], part[1][TIME_GEMM]),
          "weight gradients hide the all-reduces of backward");
}

// Returns a layout with layers of equal cost, and almost no cost at the ends: 4 stages of
// 2 layers, 8 micro-batches.
static StepLayout equal_stages(size_t v) {
    StepLayout r = {.ranks = 4, .layers = 8, .C = 4096, .NH = 32, .T = 256, .vocabulary = 128,
                    .global_batch = 8, .micro_batch = 1, .t = 1, .p = 4, .d = 1, .v = v,
                    .schedule = v > 1 ? SCHEDULE_INTERLEAVED : SCHEDULE_1F1B};
    return r;
}

static void test_steps(Check *c) {
    Cluster x = simple();
    Error err;
    StepTime time, again;
    x.gpus_per_node = 1, x.nic_bandwidth = 1e15, x.nic_collective_bandwidth = 1e15;
    for (size_t v = 1; v <= 2; v++) {
        StepLayout r = equal_stages(v);
        bool ok = step_simulate(&x, &r, &time, &err) && step_simulate(&x, &r, &again, &err);
        double idle = time.parts[TIME_IDLE], bubble = idle / (time.seconds - idle), sum = 0;
        double formula = pipeline_bubble(4, 8, (int)v);
        for (int i = 0; i < TIME_PARTS; i++) sum += time.parts[i];
        check(c, ok && fabs(bubble / formula - 1) < 0.03,
              "v = %zu: a bubble of %.4f, by the formula %.4f", v, bubble, formula);
        check(c, near(sum, time.seconds), "the parts sum to the step");
        check(c, memcmp(&time, &again, sizeof time) == 0, "the same bits twice");
        x.nic_bandwidth = 1e9;
        step_simulate(&x, &r, &time, &err);
        x.nic_bandwidth = 5e8;
        step_simulate(&x, &r, &again, &err);
        check(c,
              near(again.parts[TIME_PIPELINE], 2 * time.parts[TIME_PIPELINE]) &&
                  time.parts[TIME_PIPELINE] > 0,
              "half the bandwidth between stages, twice the time that its messages take");
        x.nic_bandwidth = 1e15;
    }
    StepLayout queued = equal_stages(1);
    queued.schedule = SCHEDULE_GPIPE, x.pipeline_overlap = true, x.nic_bandwidth = 1;
    step_simulate(&x, &queued, &time, &err);
    check(c, fabs(time.seconds / (2 * (8 + 2) * step_message(&queued)) - 1) < 1e-3,
          "messages beside compute follow each other: 8 by 3 links each way, %.3g s", time.seconds);
    StepLayout data = {.ranks = 16, .layers = 2, .C = 1024, .NH = 16, .T = 256, .vocabulary = 128,
                       .global_batch = 32, .micro_batch = 1, .t = 1, .p = 1, .d = 16, .v = 1,
                       .schedule = SCHEDULE_1F1B};
    x = simple();
    step_simulate(&x, &data, &time, &err);
    x.nic_collective_bandwidth /= 2;
    step_simulate(&x, &data, &again, &err);
    check(c,
          near(again.parts[TIME_DATA], 2 * time.parts[TIME_DATA]) && time.parts[TIME_DATA] > 0 &&
              near(again.seconds - time.seconds, time.parts[TIME_DATA]),
          "and so of the sum over data ranks");
    double parameters = 2 * (12.0 * 1024 * 1024 + 13.0 * 1024) + (256.0 + 128) * 1024;
    check(c, near(time.parts[TIME_DATA], 2.0 * 15 / 16 * 4 * parameters / 8e9),
          "which is of all parameters");
    data.layers = 3, data.p = 2, data.d = 8;
    check(c,
          step_simulate(&x, &data, &time, &err) && step_chunk_layers(&data, 0) == 2 &&
              step_chunk_layers(&data, 1) == 1,
          "3 layers on 2 stages are dealt as the trainers deal them");
    data.layers = 1;
    check(c, !step_simulate(&x, &data, &time, &err), "%s", err.text);
    data.layers = 3, data.p = 3;
    check(c, !step_simulate(&x, &data, &time, &err), "%s", err.text);
}

int main(void) {
    static Check c;
    test_files(&c);
    test_gemm(&c);
    test_memory_and_attention(&c);
    test_placement(&c);
    test_networks(&c);
    test_shared_nics(&c);
    test_collectives(&c);
    test_layers(&c);
    test_steps(&c);
    return check_summary(&c);
}
