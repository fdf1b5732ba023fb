// figures.c: draws the pictures of doc/ that come from no run:
//   - the collectives, a layer on a tensor rank, the shares of tensor ranks;
//   - the loss in parts, backward's streams, the pipeline's deadlock, bucket 0;
//   - the ring of context parallelism (with documents too), dispatch of experts;
//   - the streams of two lessons, networks of unlike nodes.
//
//   figures FOLDER      writes FOLDER/NAME.svg for each of them
#include "dev/plot/draw_buckets.h"
#include "dev/plot/draw_collectives.h"
#include "dev/plot/draw_context.h"
#include "dev/plot/draw_dispatch.h"
#include "dev/plot/draw_documents.h"
#include "dev/plot/draw_layer.h"
#include "dev/plot/draw_muon.h"
#include "dev/plot/draw_networks.h"
#include "dev/plot/draw_shards.h"
#include "dev/plot/draw_shares.h"
#include "dev/plot/draw_streams.h"
#include "dev/plot/draw_vocabulary.h"
#include "dev/plot/tool.h"

typedef struct {
    const char *name;
    void (*draw)(FILE *out);
} Figure;

static const Figure FIGURES[] = {
    {"all_reduce", draw_all_reduce},
    {"reduce_scatter", draw_reduce_scatter},
    {"all_gather", draw_all_gather},
    {"broadcast", draw_broadcast},
    {"send_receive", draw_send_receive},
    {"ring", draw_ring},
    {"layer", draw_layer},
    {"streams", draw_backward_streams},
    {"deadlock", draw_deadlock},
    {"bucket0", draw_bucket0},
    {"context", draw_context},
    {"documents", draw_documents},
    {"networks", draw_networks},
    {"shares", draw_shares},
    {"vocabulary_loss", draw_vocabulary_loss},
    {"dispatch", draw_dispatch},
    {"lesson_data", draw_lesson_data},
    {"lesson_fsdp", draw_lesson_fsdp},
    {"lesson_hsdp", draw_lesson_hsdp},
    {"lesson_muon", draw_lesson_muon},
};

int main(int argc, char **argv) {
    static const char usage[] =
        "usage: figures FOLDER    draws the pictures of doc/ that come from no run\n";
    tool_begin(argc, argv, usage);
    if (argc != 2 || argv[1][0] == '-') return fputs(usage, stderr), 2;
    for (size_t i = 0; i < sizeof FIGURES / sizeof *FIGURES; i++) {
        char path[4096];
        if (snprintf(path, sizeof path, "%s/%s.svg", argv[1], FIGURES[i].name) >=
            (int)sizeof path)
            return 2;
        FILE *out = fopen(path, "wb");
        if (out) FIGURES[i].draw(out);
        if (!out || ferror(out) | (fclose(out) != 0))
            return fprintf(stderr, "figures: cannot write %s: %s\n", path, strerror(errno)), 1;
    }
    return 0;
}
