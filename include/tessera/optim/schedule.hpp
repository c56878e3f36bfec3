/// The learning rate as a function of the step: a warm-up, then one of four forms.
///
///     optim::schedule rate(
///         {.form = optim::schedule_form::cosine, .peak = 3e-4, .steps = 1000, .warm_up = {50}});
///     rate(0);      // the first step's: 3e-4 / 50
///     rate(49);     // the warm-up's last: 3e-4
#ifndef TESSERA_OPTIM_SCHEDULE_HPP
#define TESSERA_OPTIM_SCHEDULE_HPP

#include <cmath>
#include <string_view>

#include <tessera/core/extents.hpp>

namespace tessera::inline TESSERA_ABI::optim {

/// How the rate runs from the end of the warm-up, at progress p = 0, to p = 1 after the last step:
/// `constant` stays at the peak; `linear` and `cosine` fall to the final rate along a line or half a cosine;
/// `warm_up_stable_decay` stays at the peak and falls over the last `decay` steps as 1 - sqrt of the progress
/// of that part (Hägele et al., "Scaling laws and compute-optimal training beyond fixed training durations",
/// 2024).
enum class schedule_form { constant, linear, cosine, warm_up_stable_decay };

constexpr char const* name_of(schedule_form form) noexcept {
  constexpr char const* names[] = {"constant", "linear", "cosine", "warm_up_stable_decay"};
  return names[static_cast<int>(form)];
}

/// The form of that name. Throws config_error (E-optim-005) for any other.
inline schedule_form schedule_form_named(std::string_view name, site where = site::here()) {
  for (auto form : {schedule_form::constant, schedule_form::linear, schedule_form::cosine,
                    schedule_form::warm_up_stable_decay})
    if (name == name_of(form)) return form;
  throw config_error("E-optim-005", where, "no learning rate schedule is named \"", name,
                     "\"; there are constant, linear, cosine and warm_up_stable_decay");
}

/// The first steps, in which the rate rises along a line from peak / steps to the peak.
struct warm_up {
  index_t steps = 0;

  /// The factor at 0-based `step`: (step + 1) / steps, at most 1.
  constexpr double operator()(index_t step) const noexcept {
    return step + 1 >= steps ? 1.0 : static_cast<double>(step + 1) / static_cast<double>(steps);
  }
};

struct schedule_options {
  schedule_form form = schedule_form::cosine;
  double peak = 0;
  double final_fraction = 0.1; ///< The final rate as a fraction of the peak; unused by `constant`.
  index_t steps = 0;           ///< Of the whole run, warm-up included; unused by `constant`.
  optim::warm_up warm_up = {};
  index_t decay = 0; ///< Length of the final fall; `warm_up_stable_decay` only.
};

/// A value: copy it, compare it, ask it for any step in any order.
class schedule {
public:
  schedule() = default;

  /// Throws config_error (E-optim-006) for impossible lengths or rates.
  explicit schedule(schedule_options options, site where = site::here()) : options_(options) {
    auto const& o = options_;
    auto const falls = o.form != schedule_form::constant;
    auto const decay = o.form == schedule_form::warm_up_stable_decay ? o.decay : 0;
    if (!(o.peak >= 0) || !(o.final_fraction >= 0) || o.warm_up.steps < 0 || decay < 0 || o.steps < 0 ||
        (falls && o.warm_up.steps + decay > o.steps))
      throw config_error("E-optim-006", where, "impossible ", name_of(o.form), " schedule: peak ", o.peak,
                         ", final fraction ", o.final_fraction, ", ", o.steps, " steps with ",
                         o.warm_up.steps, " of warm-up and ", decay,
                         " of decay; rates must not be negative and the parts must ", "fit into the steps");
  }

  /// The rate of 0-based `step`. From step `steps` on, the final rate.
  double operator()(index_t step) const noexcept {
    auto const& o = options_;
    if (step < o.warm_up.steps) return o.peak * o.warm_up(step);
    if (o.form == schedule_form::constant) return o.peak;
    auto const start = o.form == schedule_form::warm_up_stable_decay ? o.steps - o.decay : o.warm_up.steps;
    if (step < start) return o.peak;
    auto const progress =
        step >= o.steps ? 1.0 : static_cast<double>(step - start) / static_cast<double>(o.steps - start);
    auto const last = o.peak * o.final_fraction;
    return last + (o.peak - last) * remaining(progress);
  }

  schedule_options const& options() const noexcept { return options_; }

private:
  /// 1 at progress 0, 0 at progress 1.
  double remaining(double progress) const noexcept {
    if (options_.form == schedule_form::cosine)
      return 0.5 + 0.5 * std::cos(3.14159265358979323846 * progress);
    if (options_.form == schedule_form::warm_up_stable_decay) return 1 - std::sqrt(progress);
    return 1 - progress;
  }

  schedule_options options_{.form = schedule_form::constant};
};

} // namespace tessera::inline TESSERA_ABI::optim

#endif
