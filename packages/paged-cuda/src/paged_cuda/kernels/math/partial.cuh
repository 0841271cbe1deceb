// Constants of the split softmax. Inside a split everything is base 2 and finite: max - max is never NaN.
#define kMinusInfinity __int_as_float(0xff800000)

constexpr float kStartMax = -1.0e30f;  // running maximum before the first key; log-sum-exp of a part without keys
constexpr float kMasked = -1.0e33f;    // a masked logit: far below kStartMax, so that exp2 gives exactly 0
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
