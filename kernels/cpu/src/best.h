// The largest of each row of logits, found while they are made: nothing has to be stored, and read again, for rows that
// want no more.
#pragma once

#include "workspace.h"

namespace headrace {

class Best {
 public:
  // What a thread has met of a row, lane by lane: the first largest, or the first NaN.
  struct Lanes {
    vf value;
    vi place;
  };

  Best(Buffer& memory, int threads, int64_t rows)
      : threads_(threads), rows_(rows), lanes_(memory.get<Lanes>(threads * rows)) {}

  Lanes& of(int rank, int64_t row) const { return lanes_[rank * rows_ + row]; }

  void clear(int64_t row) const {
    for (int rank = 0; rank < threads_; ++rank) of(rank, row) = Lanes{splat(-INFINITY), splat(NONE)};
  }

  // Columns place … place + VL - 1 of the row. A thread meets a row's columns in ascending order.
  static void take(Lanes& lanes, vf value, int32_t place) {
    const vi larger = ~(vi)(value <= lanes.value) & (vi)(lanes.value == lanes.value);
    lanes.value = larger ? value : lanes.value;
    lanes.place = larger ? counting(Iota{}) + place : lanes.place;
  }

  // Of all threads. Where there is nothing but -infinity, the first column.
  void merge(int64_t row, float* peak, int64_t* best) const {
    float most = -INFINITY;
    int32_t place = NONE;
    for (int rank = 0; rank < threads_; ++rank) {
      const Lanes& lanes = of(rank, row);
      for (int i = 0; i < VL; ++i) {
        const float value = lanes.value[i];
        const bool nan = value != value, settled = most != most;
        if (nan == settled ? value > most || ((nan || value == most) && lanes.place[i] < place) : nan) {
          most = value;
          place = lanes.place[i];
        }
      }
    }
    *peak = most;
    *best = place == NONE ? 0 : place;
  }

 private:
  using Iota = headrace::Lanes;
  static constexpr int32_t NONE = INT32_MAX;

  template <int... I>
  static vi counting(std::integer_sequence<int, I...>) {
    return vi{I...};
  }

  int threads_;
  int64_t rows_;
  Lanes* lanes_;
};

}  // namespace headrace
