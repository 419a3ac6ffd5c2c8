"""Kernels of recurrent layers: what happens to the sums of one step, forward and backward.

A thread does all gates of one element of the state. T is the type that is computed in, S that of the layer's inputs and
outputs, L that of the sequence lengths; a null pointer stands for what is not there. A sequence runs at step t while t
is less than its length; behind its end its state stays, and the gradients of its sums are 0.
"""

from __future__ import annotations

_COMMON = r"""
struct step_t { i64 t, hidden, row; };  // the number of the step, the size of the state, from row to row of the gates
__device__ inline bool is_running(const L* lengths, i64 b, i64 t) { return !lengths || t < (i64)lengths[b]; }
__device__ inline T sigmoid(T x) { return T(0.5) * tanh(T(0.5) * x) + T(0.5); }
__device__ inline T bias_of(const S* bias, i64 i) { return bias ? (T)get(bias, i) : T(0); }
"""

LSTM = (
    _COMMON
    + r"""
extern "C" __global__ void lstm_cell(
    T* gates, const S* bias, const T* before, T* cell, T* h, S* y, const L* lengths, step_t s, i64 n) {
    FOR_EACH(at, n) {
        i64 b = at / s.hidden, j = at % s.hidden, width = 4 * s.hidden;
        T* gate = gates + b * s.row + j;
        T value[4];
        for (int k = 0; k < 4; ++k) {
            i64 place = k * s.hidden + j;
            T sum = gate[k * s.hidden] + (bias_of(bias, place) + bias_of(bias, width + place));
            gate[k * s.hidden] = value[k] = k < 3 ? sigmoid(sum) : tanh(sum);
        }
        if (is_running(lengths, b, s.t)) {
            T c = value[2] * before[at] + value[0] * value[3], state = value[1] * tanh(c);
            cell[at] = c;
            h[at] = state;
            put(y, at, state);
        } else {
            cell[at] = before[at];
            put(y, at, T(0));
        }
    }
}
extern "C" __global__ void lstm_cell_gradient(
    const T* gates, const T* before, const T* cell, const S* dy, T* dh, T* dc, T* sums, const L* lengths, step_t s,
    i64 n) {
    FOR_EACH(at, n) {
        i64 b = at / s.hidden, j = at % s.hidden, first = b * s.row + j;
        T* sum = sums + first;
        if (!is_running(lengths, b, s.t)) {
            for (int k = 0; k < 4; ++k) sum[k * s.hidden] = 0;
            continue;
        }
        const T* gate = gates + first;
        T i = gate[0], o = gate[s.hidden], f = gate[2 * s.hidden], g = gate[3 * s.hidden], tanh_c = tanh(cell[at]);
        T of_h = dh[at] + (dy ? (T)get(dy, at) : T(0)), of_c = dc[at] + of_h * o * (T(1) - tanh_c * tanh_c);
        sum[0] = of_c * g * i * (T(1) - i);
        sum[s.hidden] = of_h * tanh_c * o * (T(1) - o);
        sum[2 * s.hidden] = of_c * before[at] * f * (T(1) - f);
        sum[3 * s.hidden] = of_c * i * (T(1) - g * g);
        dc[at] = of_c * f;
        dh[at] = 0;
    }
}
"""
)

GRU = (
    _COMMON
    + r"""
__device__ inline void advance(T z, T n, T* h, S* y, i64 at, bool running) {
    T state = n + z * (h[at] - n);
    if (running) h[at] = state;
    put(y, at, running ? state : T(0));
}
// With linear_before_reset: one product has given `recurrent`, the sums of the state for all gates.
extern "C" __global__ void gru_cell_linear(
    T* gates, const T* recurrent, const S* bias, T* reset, T* h, S* y, const L* lengths, step_t s, i64 n) {
    FOR_EACH(at, n) {
        i64 b = at / s.hidden, j = at % s.hidden, width = 3 * s.hidden;
        T* gate = gates + b * s.row + j;
        const T* other = recurrent + b * width + j;
        T opened[2];
        for (int k = 0; k < 2; ++k) {
            i64 place = k * s.hidden + j;
            T biases = bias_of(bias, place) + bias_of(bias, width + place);
            gate[k * s.hidden] = opened[k] = sigmoid(gate[k * s.hidden] + biases + other[k * s.hidden]);
        }
        T q = other[2 * s.hidden] + bias_of(bias, width + 2 * s.hidden + j);
        T candidate = tanh(gate[2 * s.hidden] + bias_of(bias, 2 * s.hidden + j) + opened[1] * q);
        gate[2 * s.hidden] = candidate;
        reset[at] = q;
        advance(opened[0], candidate, h, y, at, is_running(lengths, b, s.t));
    }
}
// Otherwise: the sums of z and r stand in the gates; then those of the candidate, of the state that r has reset.
extern "C" __global__ void gru_open(T* gates, const S* bias, T* reset, const T* h, step_t s, i64 n) {
    FOR_EACH(at, n) {
        i64 b = at / s.hidden, j = at % s.hidden, width = 3 * s.hidden;
        T* gate = gates + b * s.row + j;
        for (int k = 0; k < 2; ++k) {
            i64 place = k * s.hidden + j;
            gate[k * s.hidden] = sigmoid(gate[k * s.hidden] + (bias_of(bias, place) + bias_of(bias, width + place)));
        }
        reset[at] = gate[s.hidden] * h[at];
    }
}
extern "C" __global__ void gru_close(
    T* gates, const S* bias, T* h, S* y, const L* lengths, step_t s, i64 n) {
    FOR_EACH(at, n) {
        i64 b = at / s.hidden, j = at % s.hidden, place = 2 * s.hidden + j;
        T* gate = gates + b * s.row + j;
        T biases = bias_of(bias, place) + bias_of(bias, 3 * s.hidden + place);
        gate[2 * s.hidden] = tanh(gate[2 * s.hidden] + biases);
        advance(gate[0], gate[2 * s.hidden], h, y, at, is_running(lengths, b, s.t));
    }
}
// `behind` gets the gradients of what R made of the state, with linear_before_reset; it is null otherwise, and the
// gradient of r is left to gru_reset_gradient.
extern "C" __global__ void gru_cell_gradient(
    const T* gates, const T* reset, const T* earlier, const S* dy, T* dh, T* sums, T* behind, const L* lengths,
    step_t s, i64 n) {
    FOR_EACH(at, n) {
        i64 b = at / s.hidden, j = at % s.hidden, first = b * s.row + j, width = 3 * s.hidden;
        T* sum = sums + first;
        bool running = is_running(lengths, b, s.t);
        T of_z = 0, of_r = 0, of_n = 0, of_q = 0;
        if (running) {
            const T* gate = gates + first;
            T z = gate[0], r = gate[s.hidden], candidate = gate[2 * s.hidden];
            T of_h = dh[at] + (dy ? (T)get(dy, at) : T(0));
            of_z = of_h * (earlier[at] - candidate) * z * (T(1) - z);
            of_n = of_h * (T(1) - z) * (T(1) - candidate * candidate);
            if (behind) {
                of_r = of_n * reset[at] * r * (T(1) - r);
                of_q = of_n * r;
            }
            dh[at] = of_h * z;
        }
        sum[0] = of_z;
        sum[s.hidden] = of_r;
        sum[2 * s.hidden] = of_n;
        if (behind) {
            T* other = behind + b * width + j;
            other[0] = of_z;
            other[s.hidden] = of_r;
            other[2 * s.hidden] = of_q;
        }
    }
}
extern "C" __global__ void gru_reset_gradient(
    const T* gates, const T* of_reset, const T* earlier, T* dh, T* sums, const L* lengths, step_t s, i64 n) {
    FOR_EACH(at, n) {
        i64 b = at / s.hidden, j = at % s.hidden, first = b * s.row + j + s.hidden;
        if (!is_running(lengths, b, s.t)) continue;
        T r = gates[first];
        sums[first] = of_reset[at] * earlier[at] * r * (T(1) - r);
        dh[at] += of_reset[at] * r;
    }
}
"""
)

SEQUENCES = (
    _COMMON
    + r"""
struct sequence_t { i64 batch, size, from_step, from_row, shift, last; };
// x as steps, batch, size, with 0 behind the end of a sequence.
extern "C" __global__ void running_part(const S* x, T* y, const L* lengths, sequence_t s, i64 n) {
    FOR_EACH(at, n) {
        i64 j = at % s.size, b = at / s.size % s.batch, t = at / s.size / s.batch;
        T value = (T)get(x, t * s.from_step + b * s.from_row + j);
        y[at] = is_running(lengths, b, t) ? value : T(0);
    }
}
// The state before each step: that of the step before (behind, with shift -1), or the first state.
extern "C" __global__ void earlier_states(
    const S* states, const T* first, T* y, const L* lengths, sequence_t s, i64 n) {
    FOR_EACH(at, n) {
        i64 j = at % s.size, b = at / s.size % s.batch, t = at / s.size / s.batch - s.shift;
        bool is_first = t < 0 || t > s.last || (s.shift < 0 && !is_running(lengths, b, t));
        y[at] = is_first ? first[b * s.size + j] : (T)get(states, t * s.from_step + b * s.from_row + j);
    }
}
"""
)
