// draw_networks.h: by which network each group of a job talks on nodes with InfiniBand and nodes
// with RoCE.
#ifndef LLMC_DRAW_NETWORKS_H
#define LLMC_DRAW_NETWORKS_H

#include "dev/plot/figure.h"
#include "llmc/sim/cost.h"
#include "llmc/grid.h"

enum { NETWORKS_NODE = 8, NETWORKS_NODES = 8, NETWORKS_RANKS = NETWORKS_NODE * NETWORKS_NODES };
static const char *const NETWORKS_NAMES[] = {"InfiniBand", "RoCE", "Ethernet", "NVLink"};
static const char *const NETWORKS_COLORS[] = {"#1f6fb5", "#2f8f63", "#b8431a", "#6b3fa0"};

// Returns a cluster in which half of the nodes have InfiniBand, the others RoCE.
static inline Cluster networks_cluster(void) {
    Cluster c;
    memset(&c, 0, sizeof c);
    c.gpus_per_node = NETWORKS_NODE, c.infiniband_nodes = c.roce_nodes = NETWORKS_NODES / 2;
    c.network[NETWORK_ROCE][0] = c.network[NETWORK_ETHERNET][0] = 1;
    return c;
}

// Returns the position in NETWORKS_NAMES of the network of a group of rank `rank`. The group is
// a letter of grid_group, with t = 4, d = 8, p = 2. Stores its ranks.
static inline int networks_of(const Cluster *c, const char *order, size_t rank, char group,
                              size_t *ranks, size_t *count) {
    Grid g = {0, 0, 4, 8, 2, 0, 0, 0, ""};
    Error err;
    int members[NETWORKS_RANKS];
    if (!grid_make(&g, NETWORKS_RANKS, rank, order, &err)) abort();
    *count = grid_group(&g, group, members);
    for (size_t i = 0; i < *count; i++) ranks[i] = (size_t)members[i];
    Placement place = placement_ranks(c, ranks, *count, NETWORKS_RANKS);
    return place.nodes == 1 ? 3 : (int)place.network;
}

// Draws a node's ranks. The ranks of rank 0's data group at the same stage are filled.
static inline void draw_networks_node(FILE *out, const Cluster *c, size_t node, double x,
                                      double y) {
    size_t data[NETWORKS_RANKS], count, first = node * NETWORKS_NODE;
    int network = (int)cluster_network(c, first, first),
        over = networks_of(c, "tdp", first, 'd', data, &count);
    svg_rect(out, x, y, 400, 44, "#ffffff", NETWORKS_COLORS[network]);
    FIGURE_LABEL(out, x + 8, y + 19, "start", SVG_INK, "node %zu", node);
    FIGURE_LABEL(out, x + 8, y + 36, "start", NETWORKS_COLORS[network], "%s",
                 NETWORKS_NAMES[network]);
    for (size_t i = 0; i < NETWORKS_NODE; i++) {
        double left = x + 88 + 37 * (double)i + 8 * (double)(i / 4);
        bool member = false;
        for (size_t k = 0; k < count; k++) member = member || data[k] == first + i;
        figure_box(out, left, y + 8, 34, 28, member ? NETWORKS_COLORS[over] : FIGURE_WHOLE, "%s",
                   "");
        svg_text(out, left + 17, y + 27, FIGURE_SMALL, 400, "middle",
                 member ? "#ffffff" : SVG_INK, "%zu", first + i);
        if (i % 4 == 0)  // the tensor group
            svg_rect(out, left - 3, y + 4, 37 * 4 + 2, 36, "none", NETWORKS_COLORS[3]);
    }
}

// Draws which groups a rank's are, in two orders of the axes: their ranks, and the network.
static inline void draw_networks_table(FILE *out, const Cluster *c, double y) {
    static const struct { const char *name; size_t rank; char group;
    } rows[] = {{"tensor ranks of rank 0", 0, 't'},
                {"data ranks of rank 0", 0, 'd'},
                {"data ranks of the last rank", 63, 'd'},
                {"stages of rank 0", 0, 'p'},
                {"the two uses of the embedding", 0, 'e'}};
    for (int o = 0; o < 2; o++) {
        double x = 250 + 320 * o;
        svg_text(out, x, y, FIGURE_TEXT, 700, "start", SVG_INK, "--order %s", o ? "ptd" : "tdp");
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            size_t ranks[NETWORKS_RANKS], count;
            int network =
                networks_of(c, o ? "ptd" : "tdp", rows[i].rank, rows[i].group, ranks, &count);
            double line = y + 24 * (double)(i + 1);
            if (o == 0) FIGURE_LABEL(out, 20, line, "start", SVG_INK, "%s", rows[i].name);
            svg_text(out, x, line, FIGURE_SMALL, 700, "start", NETWORKS_COLORS[network], "%s",
                     NETWORKS_NAMES[network]);
            FIGURE_NOTE(out, x + 90, line,
                        count > 2 ? "ranks %zu, %zu, ..., %zu" : "ranks %zu and %zu", ranks[0],
                        ranks[1], ranks[count - 1]);
        }
    }
}

static inline void draw_networks(FILE *out) {
    Cluster c = networks_cluster();
    figure_begin(out, 880, 486,
                 "Who talks over what: 4 tensor x 8 data x 2 pipeline ranks on unlike nodes");
    for (size_t node = 0; node < NETWORKS_NODES; node++) {
        size_t stage = node / (NETWORKS_NODES / 2), row = node % (NETWORKS_NODES / 2);
        double y = 66 + 56 * (double)row;
        draw_networks_node(out, &c, node, 20 + 440 * (double)stage, y);
        if (stage == 0)
            figure_arrow(out, 420, y + 22, 460, y + 22, NETWORKS_COLORS[NETWORK_ETHERNET], true);
    }
    svg_text(out, 20, 54, FIGURE_TEXT, 700, "start", SVG_INK, "stage 0");
    svg_text(out, 460, 54, FIGURE_TEXT, 700, "start", SVG_INK, "stage 1");
    draw_networks_table(out, &c, 320);
    FIGURE_NOTE(
        out, 20, 470,
        "Filled: a data group of each stage. Framed: tensor groups. Dashed: messages between "
        "stages.");
    svg_end(out);
}

#endif
