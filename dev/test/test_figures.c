// test_figures.c: tests the drawings of dev/plot/figures.c. They are whole, no text is cut off,
// and the ring of collectives.md ends as an all-reduce does. The script run_docs.sh compares
// them with doc/pictures.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define main figures_main
#include "dev/plot/figures.c"
#undef main

#include "dev/test/check.h"
#include "dev/test/pictures.h"

static Check c;

// The number behind name=" in an element.
static double attribute(const char *element, const char *name) {
    char key[32];
    snprintf(key, sizeof key, " %s=\"", name);
    const char *at = strstr(element, key);
    return at ? atof(at + strlen(key)) : NAN;
}

// Is every text inside the picture? A character is taken as 0.6 of the size wide, as in a wide
// font.
static bool texts_fit(const char *picture) {
    double width = attribute(picture, "width"), height = attribute(picture, "height");
    bool fit = width > 0 && width <= 910; // wider ones are shrunk where GitHub shows them
    for (const char *at = picture; (at = strstr(at, "<text ")); at++) {
        const char *text = strchr(at, '>') + 1, *anchor = strstr(at, "text-anchor=\"") + 13;
        size_t length = strcspn(text, "<");
        double x = attribute(at, "x"), w = 0.6 * attribute(at, "font-size") * (double)length;
        double left = *anchor == 'm' ? x - w / 2 : *anchor == 'e' ? x - w : x;
        if (left >= 0 && left + w <= width && attribute(at, "y") <= height) continue;
        printf("     sticks out: %.*s\n", (int)length, text);
        fit = false;
    }
    return fit;
}

static int draw_into(const char *folder) {
    char program[] = "figures", path[1024];
    snprintf(path, sizeof path, "%s", folder);
    char *arguments[] = {program, path, NULL};
    return figures_main(2, arguments);
}

int main(void) {
    char dir[512];
    picture_folder(dir, "test_figures", 1, NULL);
    check(&c, draw_into(dir) == 0, "figures writes all drawings");
    for (size_t i = 0; i < sizeof FIGURES / sizeof *FIGURES; i++) {
        char *text = read_picture(dir, FIGURES[i].name);
        check(&c, occurrences(text, "<text ") > 5 && texts_fit(text),
              "%s: whole, and no text is cut off", FIGURES[i].name);
        if (strcmp(FIGURES[i].name, "ring") == 0)
            check(&c, occurrences(text, ">abc<") == 3 + 6 + 9,
                  "ring: after four steps every rank has every sum");
        if (strcmp(FIGURES[i].name, "networks") == 0)
            check(&c,
                  occurrences(text, ">InfiniBand<") == 5 && occurrences(text, ">RoCE<") == 5 &&
                      occurrences(text, ">Ethernet<") == 4 && occurrences(text, ">NVLink<") == 4,
                  "networks: data groups inside a kind of node have its network, or Ethernet "
                  "across");
        free(text);
    }
    remove_tree(dir);
    size_t ranks[NETWORKS_RANKS], count;
    Cluster odd = networks_cluster();
    odd.infiniband_nodes = 3, odd.roce_nodes = 5;
    check(&c, networks_of(&odd, "tdp", 0, 'd', ranks, &count) == NETWORK_ETHERNET && count == 8 &&
                  networks_of(&odd, "tdp", 63, 'd', ranks, &count) == NETWORK_ROCE,
          "networks: with one node of another kind in it a data group has Ethernet");
    char program[] = "figures", *none[] = {program, NULL};
    check(&c, draw_into(dir) == 1 && figures_main(1, none) == 2,
          "figures refuses a folder that is not there, and none");
    return check_summary(&c);
}
