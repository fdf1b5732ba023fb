// programs.h: the programs of dev/plot as functions, for tests and fuzzers that call them with a
// command line. A name that several of them use gets a prefix here.
//
// defines: timeline_main, profile_main, schedule_main, loss_main
#ifndef DEV_PLOT_PROGRAMS_H
#define DEV_PLOT_PROGRAMS_H

#define main timeline_main
#define draw timeline_draw
#include "dev/plot/timeline.c"
#undef main
#undef draw

#define main profile_main
#define draw profile_draw
#define draw_legend profile_draw_legend
#define LEFT PROFILE_LEFT
#define RIGHT PROFILE_RIGHT
#define TOP PROFILE_TOP
#define MAX_RANKS PROFILE_MAX_RANKS
#include "dev/plot/profile.c"
#undef main
#undef draw
#undef draw_legend
#undef LEFT
#undef RIGHT
#undef TOP
#undef MAX_RANKS

#define main schedule_main
#include "dev/plot/schedule.c"
#undef main

#define main loss_main
#define draw loss_draw
#define Run LossRun
#include "dev/plot/loss.c"
#undef main
#undef draw
#undef Run

#endif
