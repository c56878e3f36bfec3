// requires: mpi
//
// An MPI program that was there before Tessera, and two headers of Tessera in it.
//
// A rod is heated by eight heaters; a Jacobi iteration finds the steady temperature that a set of powers
// gives. Wanted are the powers that make the whole rod equally warm. The rod is cut among the ranks of the
// program's own communicator; the program's own halo exchange stays as it is. What Tessera adds:
//
//   1. response[h] = Jacobi solution for heater h alone at power 1
//                    comm.all_reduce: the largest change of a sweep, one value
//   2. repeat:
//        temperature = sum over h of power[h] * response[h]
//        gradient[h] = sum over points of (temperature - 1) * response[h] / points
//                      comm.all_reduce: 8 gradients, summed in rank order: every rank has the same bits
//        power       = AdamW(power, gradient)
//                      optim::adamw: one fused pass
//
// Build: mpicxx -std=c++20 -O2 -Iinclude -DTESSERA_WITH_MPI examples/existing_mpi_code.cpp
// Run:   mpiexec -n 2 ./a.out
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include <mpi.h>

#include <tessera/comm/mpi.hpp>
#include <tessera/optim/adamw.hpp>

namespace {

constexpr int points = 256;    // of the whole rod
constexpr int heaters = 8;     // evenly spaced, each as wide as its share of the rod allows
constexpr double loss = 0.002; // of heat to the air, at every point

/// The part of the rod that a rank holds, with one ghost point at either side.
struct rod {
  MPI_Comm comm;
  int rank, ranks, first, count;
  std::vector<double> now, next;

  explicit rod(MPI_Comm c) : comm(c) {
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &ranks);
    first = points * rank / ranks;
    count = points * (rank + 1) / ranks - first;
    now.assign(static_cast<std::size_t>(count) + 2, 0.0);
    next = now;
  }

  /// The neighbours' border points into the ghosts; the ends of the rod stay at 0.
  void exchange_halos() {
    int const left = rank > 0 ? rank - 1 : MPI_PROC_NULL, right = rank + 1 < ranks ? rank + 1 : MPI_PROC_NULL;
    auto* u = now.data();
    MPI_Sendrecv(u + 1, 1, MPI_DOUBLE, left, 0, u + count + 1, 1, MPI_DOUBLE, right, 0, comm,
                 MPI_STATUS_IGNORE);
    MPI_Sendrecv(u + count, 1, MPI_DOUBLE, right, 1, u, 1, MPI_DOUBLE, left, 1, comm, MPI_STATUS_IGNORE);
  }

  /// One Jacobi sweep of  -u'' + loss u = heat; returns this rank's largest change.
  double sweep(int heater) {
    exchange_halos();
    auto change = 0.0;
    for (int i = 1; i <= count; ++i) {
      auto const at = static_cast<std::size_t>(i);
      auto const heat = (first + i - 1) * heaters / points == heater ? loss : 0.0;
      next[at] = (now[at - 1] + now[at + 1] + heat) / (2 + loss);
      change = std::max(change, std::abs(next[at] - now[at]));
    }
    now.swap(next);
    return change;
  }
};

} // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  {
    MPI_Comm mine; // the program's own communicator, which stays the program's
    MPI_Comm_dup(MPI_COMM_WORLD, &mine);
    // This process has one thread, and MPI_Init is enough for that.
    tessera::comm::mpi comm(mine, {.level = tessera::comm::mpi_threads::single});

    std::vector<std::vector<float>> response;
    auto sweeps = 0;
    for (int h = 0; h < heaters; ++h) {
      rod r(mine);
      auto largest = 1.0;
      for (int s = 0; largest > 1e-9; ++s, ++sweeps)
        if (auto const change = r.sweep(h); s % 50 == 0)
          largest = comm.all_reduce(change, {.operation = tessera::comm::reduction::max});
      response.emplace_back(r.now.begin() + 1, r.now.end() - 1);
    }

    tessera::exec::host ex({.threads = 1});
    std::vector<float> power(heaters, 0.0f), gradient(heaters);
    tessera::optim::adamw<tessera::exec::host, float> optimizer(ex, heaters, {.weight_decay = 0}, {});
    auto error = 0.0;
    for (int step = 1; step <= 400; ++step) {
      std::fill(gradient.begin(), gradient.end(), 0.0f);
      auto squares = 0.0;
      for (std::size_t i = 0; i < response[0].size(); ++i) {
        auto temperature = 0.0f;
        for (std::size_t h = 0; h < heaters; ++h) temperature += power[h] * response[h][i];
        for (std::size_t h = 0; h < heaters; ++h) gradient[h] += (temperature - 1) * response[h][i];
        squares += (temperature - 1.0) * (temperature - 1.0);
      }
      comm.all_reduce(std::span<float>(gradient));
      error = std::sqrt(comm.all_reduce(squares) / points);
      optimizer.step(ex, std::span<float>(power), std::span<float const>(gradient),
                     {.step = step, .learning_rate = 0.05, .gradient_scale = 1.0 / points});
      if (comm.rank() == 0 && (step == 1 || step % 100 == 0))
        std::printf("step %3d  error of the temperature %.4f\n", step, error);
    }
    if (comm.rank() == 0) {
      std::printf("powers:");
      for (auto p : power) std::printf(" %.2f", static_cast<double>(p));
      std::printf("\n%d Jacobi sweeps, %lld all_reduce calls\n", sweeps,
                  static_cast<long long>(comm.meter().of(tessera::comm::collective::all_reduce).calls));
    }
    MPI_Comm_free(&mine);
  }
  MPI_Finalize();
}
