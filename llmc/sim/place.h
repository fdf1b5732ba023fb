// place.h: which ranks of a grid have the worst places on nodes.
//
// defines: grid_worst_data_rank
#ifndef LLMC_SIM_PLACE_H
#define LLMC_SIM_PLACE_H

#include "llmc/grid.h"
#include "llmc/sim/cluster.h"

// Returns the data rank whose layers and messages leave nodes most often, by the slowest networks, and of several the
// one with fewest ranks of a tensor group in a node. If groups or stages do not fill nodes, or nodes are unlike, the
// job waits for it. Ranks a node apart sit alike on like nodes.
static inline size_t grid_worst_data_rank(const Grid *g, const Cluster *c) {
    size_t worst = 0, most = 0, node = (size_t)c->gpus_per_node, unlike = c->network[NETWORK_ETHERNET][0] > 0;
    for (size_t d = 0; d < g->d && (d < node || unlike); d++) {
        size_t count = 0;
        for (size_t p = 0; p < g->p; p++) {
            size_t first = (size_t)grid_rank_at(g, 0, d, p), last = (size_t)grid_rank_at(g, g->t - 1, d, p);
            size_t next = (size_t)grid_rank_at(g, 0, d, (p + 1) % g->p);
            size_t apart = last / node - first / node, ends[] = {node - first % node, last % node + 1};
            count += node * apart * (1 + (size_t)cluster_network(c, first, last));
            if (next / node != first / node) count += node * (1 + (size_t)cluster_network(c, first, next));
            if (apart) count += node - (ends[0] < ends[1] ? ends[0] : ends[1]);
        }
        if (count > most) most = count, worst = d;
    }
    return worst;
}

#endif
